"""Of many groups only the best are ranked: the same ones, in the same order, as when all are."""

from __future__ import annotations

import random

import pytest

from router.routing.pairing import Sources, rank_with_sources
from router.routing.policy import (
    GroupLoad,
    PlacementPolicy,
    PolicyConfig,
    RequestView,
    baseline_of,
    cost_terms,
    quick_costs,
    rank,
    split_prompt,
)
from workers.types import GroupId, Role

KEEP = 8
ALL = 10**9


def some_groups(draw: random.Random, count: int, role: Role, *, is_idle: bool = False) -> list[GroupLoad]:
    loads = []
    for number in range(count):
        load = GroupLoad(
            group_id=GroupId(f"{role.value}{number:03d}"),
            block_size=16,
            available_blocks=5000,
            role=role,
            kv_format=draw.choice(["f", "f", "f", ""]),
            block_bytes=368_640,
        )
        if not is_idle:
            load.prefill_tokens_per_s = draw.choice([None, 1500.0, draw.uniform(500, 5000)])
            load.rate_trust = draw.choice([1.0, draw.random()])
            load.step_s = draw.choice([None, draw.uniform(0.01, 0.1)])
            load.waiting_tokens = draw.choice([0, 0, draw.randrange(30_000)])
            load.charged_tokens = draw.choice([0, 0, draw.randrange(20_000)])
            load.num_running, load.num_waiting = draw.randrange(4), draw.randrange(3)
            load.running_tokens, load.context_token_s = draw.randrange(9000), draw.choice([0.0, 1e-6])
            load.charged_requests, load.own_requests = draw.randrange(2), draw.randrange(5)
            load.available_blocks = draw.choice([5000, draw.randrange(900)])
            load.active_blocks = draw.choice([0, draw.randrange(5000)])
            load.recent_requests = draw.choice([0.0, draw.uniform(0, 80)])
            load.silent_s = draw.choice([0.1, 0.1, 0.1, 4.0])
        loads.append(load)
    return loads


def some_request(draw: random.Random) -> RequestView:
    return RequestView(
        num_prompt_tokens=draw.choice([1, 15, 16, 17, draw.randrange(1, 12_000)]),
        max_output_tokens=draw.choice([1, 100, 2000]),
        num_choices=draw.choice([1, 1, 3]),
        spread_key=draw.randbytes(8),
    )


def some_matches(draw: random.Random, loads: list[GroupLoad], num_tokens: int) -> dict[GroupId, int]:
    most = num_tokens // 16
    return {load.group_id: draw.choice([0, min(2, most), draw.randint(0, most)]) for load in loads}


@pytest.mark.parametrize("seed", range(150))
def test_the_best_are_those_of_all(seed: int) -> None:
    draw = random.Random(seed)
    config = PolicyConfig(policy=draw.choice([PlacementPolicy.PREFIX, PlacementPolicy.LEAST_LOADED]))
    role = draw.choice([Role.UNIFIED, Role.DECODE])
    loads = some_groups(draw, draw.choice([9, 60]), role, is_idle=seed % 10 == 0)
    request = some_request(draw)
    matches = some_matches(draw, loads, request.num_prompt_tokens)
    few, every = (rank(request, loads, matches, config, keep=keep) for keep in (KEEP, ALL))
    assert len(every) == len(loads)
    assert few[:KEEP] == every[:KEEP]
    order = {choice.group_id: place for place, choice in enumerate(every)}
    places = [order[choice.group_id] for choice in few]
    assert places == sorted(places)  # what comes after them is in order too


@pytest.mark.parametrize("seed", range(150))
def test_the_best_with_sources_are_those_of_all(seed: int) -> None:
    draw = random.Random(seed)
    config = PolicyConfig(policy=draw.choice([PlacementPolicy.PREFIX, PlacementPolicy.LEAST_LOADED]))
    loads = some_groups(draw, draw.choice([9, 60]), Role.DECODE, is_idle=seed % 10 == 0)
    prefill = some_groups(draw, draw.choice([0, 3, 40]), Role.PREFILL)
    request = some_request(draw)
    matches = some_matches(draw, [*loads, *prefill], request.num_prompt_tokens)
    pairs = [(a.group_id, b.group_id) for a in [*prefill, *loads[:5]] for b in draw.sample(loads, 5)]
    sources = Sources(
        prefill=prefill,
        cached={load.group_id: draw.randint(0, matches[load.group_id]) for load in loads},
        bytes_per_s={pair: draw.uniform(1e7, 1e10) for pair in pairs},
        barred=frozenset(draw.sample(pairs, 5)),
    )
    few, every = (
        rank_with_sources(request, loads, matches, sources, config, keep=keep) for keep in (KEEP, ALL)
    )
    assert few[:KEEP] == every[:KEEP]


@pytest.mark.parametrize("seed", range(20))
def test_the_quick_cost_is_the_cost(seed: int) -> None:
    draw = random.Random(seed)
    config, request = PolicyConfig(), some_request(draw)
    loads = [*some_groups(draw, 30, Role.UNIFIED), *some_groups(draw, 30, Role.DECODE)]
    matches = some_matches(draw, loads, request.num_prompt_tokens)
    baseline = baseline_of(loads, config)
    for load, parts in zip(loads, quick_costs(request, loads, matches, baseline, config), strict=True):
        split = split_prompt(request.num_prompt_tokens, 16, matches[load.group_id])
        terms = cost_terms(request, load, split.uncached, baseline, config)
        assert parts[0] == pytest.approx(terms["queue"], abs=1e-6)
        computing = terms["prefill"] + terms["delay"] + terms.get("interference", 0.0)
        assert parts[1] == pytest.approx(computing, rel=1e-9)
        assert sum(parts) == pytest.approx(sum(terms.values()), rel=1e-9, abs=1e-6)
