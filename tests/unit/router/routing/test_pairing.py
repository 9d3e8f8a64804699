"""Choices in which two groups take part, and what is learnt of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from router.dispatch.interface import PairState
from router.dispatch.pairs import PairTable
from router.routing.pairing import Pair, Sources, rank_with_sources
from router.routing.policy import (
    Choice,
    GroupLoad,
    PlacementPolicy,
    PolicyConfig,
    RequestView,
    rank,
    whole_block_tokens,
)
from tests.unit.router.fakes import INFO
from workers.types import GroupId, Role, SourceReads

D, E, P, Q, U, V = (GroupId(name) for name in ("d", "e", "p", "q", "u", "v"))
CONFIG = PolicyConfig()
REQUEST = RequestView(num_prompt_tokens=1000, max_output_tokens=128, spread_key=b"prompt")
ROLES = {"d": Role.DECODE, "e": Role.DECODE, "p": Role.PREFILL, "q": Role.PREFILL}


def load(group_id: GroupId, **changes: float | str) -> GroupLoad:
    idle = GroupLoad(
        group_id=group_id,
        block_size=16,
        prefill_tokens_per_s=4000.0,
        step_s=0.02,
        available_blocks=1000,
        role=ROLES.get(group_id, Role.UNIFIED),
        kv_format="m",
        block_bytes=100_000,
    )
    return replace(idle, **changes)  # type: ignore[arg-type]  # test shorthand: fields by name


def best(
    loads: list[GroupLoad],
    *prefill: GroupLoad,
    request: RequestView = REQUEST,
    matches: Mapping[GroupId, int] | None = None,
    cached: Mapping[GroupId, int] | None = None,
    config: PolicyConfig = CONFIG,
    **more: object,
) -> Choice:
    sources = Sources(prefill=prefill, cached=cached or {}, **more)  # type: ignore[arg-type]
    return rank_with_sources(request, loads, matches or {}, sources, config)[0]


def test_the_terms_of_a_pair_are_milliseconds_and_add_up() -> None:
    reader = load(D, waiting_tokens=2000, num_running=3)
    source = load(P, waiting_tokens=200, num_waiting=1, recent_requests=1.0)
    sources = Sources(prefill=[source, load(Q, silent_s=9.0)], bytes_per_s={(P, D): 5e8})
    choices = rank_with_sources(REQUEST, [reader], {P: 20, D: 10}, sources, CONFIG)
    assert [choice.source for choice in choices] == [P, None, Q]
    pair, alone, _ = choices
    assert (pair.group_id, pair.fetched_tokens, alone.fetched_tokens) == (D, 832, 0)  # 62 blocks, 10 there
    transfer_ms = 10.0 + 52 * 100_000 / 5e5
    assert pair.terms == {
        "queue": pytest.approx(500.0 - (50.0 + 170.0) - transfer_ms),  # what is left of it by then
        "prefill": pytest.approx(2.0),  # 8 tokens after the last full block
        "delay": pytest.approx(0.8 * 2.0),
        "interference": pytest.approx(1.0),
        "decode": pytest.approx(128 * 20.0 * 0.02 * 3),
        "context": 0.0,
        "memory": 0.0,
        "silent": 0.0,
        "balance": 0.0,
        "transfer": pytest.approx(transfer_ms),
        "source_queue": 50.0,
        "source_prefill": 170.0,  # 320 of the prompt are cached there
        "source_delay": pytest.approx(0.6 * 170.0),
        "source_memory": 0.0,
        "source_silent": 0.0,
        "source_balance": pytest.approx(35.0 / 4),
    }
    assert pair.cost_ms == pytest.approx(sum(pair.terms.values()))
    assert alone.terms["interference"] == 0.5 * alone.terms["prefill"] == 105.0


def test_without_a_source_the_costs_are_those_of_one_pool() -> None:
    loads = [load(U, num_running=2), load(V, waiting_tokens=300)]
    for policy in PlacementPolicy:
        config = replace(CONFIG, policy=policy)
        alone = rank(REQUEST, loads, {U: 10}, config)
        assert rank_with_sources(REQUEST, loads, {U: 10}, Sources(), config) == alone


def test_long_prompts_go_to_the_prefill_pool_and_short_ones_stay() -> None:
    for num_tokens, source in ((1000, P), (200, P), (60, None), (16, None), (1, None)):
        request = replace(REQUEST, num_prompt_tokens=num_tokens)
        assert best([load(D)], load(P), request=request).source == source, num_tokens
    assert best([load(D)], load(P), matches={D: 60}).source is None  # only a suffix is missing
    assert best([load(D)], load(P), matches={D: 62}).source is None


def test_a_busy_prefill_pool_is_passed_over() -> None:
    assert best([load(D)], load(P, waiting_tokens=300)).source == P
    assert best([load(D)], load(P, waiting_tokens=600)).source is None
    assert best([load(D)], load(P, charged_tokens=600), load(Q)).source == Q
    assert best([load(D)], load(P, available_blocks=0, active_blocks=900)).source is None
    assert best([load(D, num_running=20)], load(P, waiting_tokens=600)).source == P  # whom it would disturb


def test_the_prefill_group_that_has_the_prompt_is_asked() -> None:
    assert best([load(D)], load(P), load(Q), matches={Q: 40}).source == Q
    assert best([load(D)], load(P), load(Q, waiting_tokens=1000), matches={Q: 40}).source == P
    config = replace(CONFIG, policy=PlacementPolicy.LEAST_LOADED)
    assert best([load(D)], load(P), load(Q, num_waiting=1), matches={Q: 40}, config=config).source == P


def test_the_reader_that_lacks_least_is_chosen() -> None:
    choice = best([load(D), load(E)], load(P), matches={E: 30, P: 62})
    assert (choice.group_id, choice.source, choice.fetched_tokens) == (E, P, 512)


@pytest.mark.parametrize("source", [load(P, kv_format="other"), load(P, kv_format="")])
def test_groups_that_cannot_read_each_other_are_no_pair(source: GroupLoad) -> None:
    assert best([load(D)], source).source is None
    assert best([load(D, kv_format=source.kv_format)], source).source == (P if source.kv_format else None)


def test_a_pair_that_failed_or_is_slow_is_left_alone() -> None:
    assert best([load(D)], load(P), barred=frozenset([(P, D)])).source is None
    assert best([load(D)], load(P), bytes_per_s={(P, D): 1e7}).source is None
    assert best([load(D)], load(P), bytes_per_s={(D, P): 1e7}).source == P


def test_a_neighbour_s_cache_is_read_when_its_group_is_busy() -> None:
    busy = load(U, waiting_tokens=1500)
    choice = best([busy, load(V)], matches={U: 60}, cached={U: 60, V: 0})
    assert (choice.group_id, choice.source, choice.fetched_tokens) == (V, U, 960)
    assert best([load(U), load(V)], matches={U: 60}, cached={U: 60}).source is None
    # Blocks that are only expected there are none to read.
    assert best([busy, load(V)], matches={U: 60}, cached={U: 0, V: 0}).source is None
    assert best([replace(busy, silent_s=5.0), load(V)], matches={U: 60}, cached={U: 60}).source is None


def test_of_a_prefill_group_and_a_neighbour_the_sooner_one_is_asked() -> None:
    loads = [load(D), load(E, num_running=40)]
    assert best(loads, load(P), matches={E: 62}, cached={E: 62, D: 0}).source == E
    assert best(loads, load(P), matches={E: 10}, cached={E: 10, D: 0}).source == P


def test_only_full_blocks_before_the_last_token_can_be_read() -> None:
    assert [whole_block_tokens(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 0, 0, 0, 16, 16, 32]


def test_round_robin_takes_turns_on_both_sides() -> None:
    config = replace(CONFIG, policy=PlacementPolicy.ROUND_ROBIN)
    pairs = []
    for turn in range(6):
        request = replace(REQUEST, turn=turn)
        choice = best([load(D), load(E)], load(P), load(Q), load(U), request=request, config=config)
        pairs.append((choice.group_id, choice.source))
    assert pairs == [(D, P), (E, Q), (D, U), (E, P), (D, Q), (E, U)]
    sources = Sources(prefill=[load(P), load(Q)])
    choices = rank_with_sources(replace(REQUEST, turn=1), [load(D), load(E)], {}, sources, config)
    assert [(choice.group_id, choice.source) for choice in choices] == [
        (E, Q), (E, P), (E, None), (D, Q), (D, P), (D, None)]  # fmt: skip
    silent = best([load(D)], load(P, silent_s=9.0), load(Q), request=replace(REQUEST, turn=0), config=config)
    assert silent.source == Q
    short = replace(REQUEST, num_prompt_tokens=16)
    assert best([load(D)], load(P), request=short, config=config).source is None


def test_many_groups_are_weighed_with_a_few_sources_each() -> None:
    loads = [load(GroupId(f"d{i}")) for i in range(32)]
    prefill = [load(GroupId(f"p{i}"), waiting_tokens=10 * i) for i in range(32)]
    choices = rank_with_sources(REQUEST, loads, {}, Sources(prefill=prefill), CONFIG)
    assert len(choices) == 32 * 5
    assert {choice.source for choice in choices} == {"p0", "p1", "p2", "p3", None}


# ---- what is learnt of pairs


def test_rates_and_failures_of_a_pair() -> None:
    now_s = 100.0
    table = PairTable(lambda: now_s)
    table.on_read((P, D), 1_000_000)
    table.on_read((P, D), 3_000_000)
    table.on_read((Q, D), 10_000_000)
    table.on_failed((P, E))
    assert table.barred() == frozenset()
    table.on_failed((P, E))
    assert table.barred() == {(P, E)}
    assert [state[:4] for state in table.states()] == [(P, D, 2, 0), (P, E, 0, 2), (Q, D, 1, 0)]
    assert [state.num_bytes for state in table.states()] == [4_000_000, 0, 10_000_000]
    assert table.states()[1] == PairState(P, E, 0, 2, None)
    now_s = 110.0
    assert table.barred() == frozenset()
    table.on_read((P, E), 1)
    table.on_failed((P, E))
    assert table.barred() == frozenset()
    table.drop(P)
    assert [state[:2] for state in table.states()] == [(Q, D)]


def test_the_rate_of_a_pair_is_what_its_reader_tells() -> None:
    table = PairTable(lambda: 0.0)
    reader = replace(INFO, group_id=D, kv_bytes_per_block=10_000)

    def hears(**reads: float) -> dict[Pair, float]:
        told = [SourceReads(group_id=group_id, **reads) for group_id in (P, E)]  # type: ignore[arg-type]
        table.hear(reader, told, {P, D})  # E has left
        return {pair: round(rate, 3) for pair, rate in table.rates().items()}

    assert hears(num_open=1) == {}
    assert hears(num_blocks=100, seconds=0.1) == {(P, D): 1e7}
    assert hears(num_blocks=106, seconds=9.0) == {(P, D): 1e7}  # too little to tell
    assert hears(num_blocks=400, seconds=0.2) == {(P, D): 2e7}  # 3 MB in 0.1 s: the mean of two
    assert hears(num_blocks=400, seconds=0.2) == {(P, D): 2e7}
    assert hears(num_blocks=50, seconds=0.01) == {(P, D): 3e7}  # it counts anew
    for turn in range(1, 40):
        hears(num_blocks=50 + 100 * turn, seconds=0.01 + 0.01 * turn)
    assert hears(num_blocks=4950, seconds=0.5)[P, D] == pytest.approx(1e8, rel=1e-3)
    assert [state[:4] for state in table.states()] == [(P, D, 0, 0)]
