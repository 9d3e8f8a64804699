"""What placement comes to, in virtual time: the router's code over fake groups (see `simulation`)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.routing.policy import PlacementPolicy
from tests.unit.router.simulation import SMALL_MODEL, Conversations, Outcome, Speed, Work, simulate

PREFIX, LEAST_LOADED, ROUND_ROBIN = PlacementPolicy


def unlimited(work: Work, speed: Speed = SMALL_MODEL) -> Outcome:
    """One group with room for everything: the most that can be found in a cache."""
    return simulate(work, PREFIX, num_groups=1, num_blocks=1_000_000, speed=speed)


@pytest.mark.parametrize(("max_concurrent", "seed"), [(40, 0), (40, 1), (8, 0), (8, 1), (1, 0)])
def test_conversations_with_one_system_prompt(max_concurrent: int, seed: int) -> None:
    work = Work(Conversations(num=40, turns=4, system_tokens=1000, seed=seed).chains(), max_concurrent)
    best = unlimited(work)
    aware = simulate(work, PREFIX)
    assert sum(aware.requests.values()) == 160
    assert aware.cached_tokens >= 0.96 * best.cached_tokens
    assert aware.request_ratio <= 1.25
    assert aware.work_ratio <= 1.25
    unaware = simulate(work, ROUND_ROBIN)
    assert aware.cached_tokens > unaware.cached_tokens
    assert aware.prompt_tokens == unaware.prompt_tokens
    assert aware.seconds < 1.02 * unaware.seconds


@pytest.mark.parametrize("max_concurrent", [8, 2, 1])
def test_a_fast_model_with_short_turns_is_balanced_too(max_concurrent: int) -> None:
    chains = Conversations(question_tokens=(24, 24), answer_tokens=(16, 16)).chains()
    work = Work(chains, max_concurrent, pause_s=0.01)
    speed = Speed(base_s=0.002, per_prompt_token_s=30e-6, per_row_s=100e-6)
    best, aware = unlimited(work, speed), simulate(work, PREFIX, speed=speed)
    assert aware.cached_tokens >= 0.97 * best.cached_tokens
    assert aware.request_ratio <= 1.25


@pytest.mark.parametrize("policy", [LEAST_LOADED, ROUND_ROBIN])
def test_conversations_of_their_own_show_what_awareness_is_for(policy: PlacementPolicy) -> None:
    work = Work(Conversations(is_shared=False).chains(), max_concurrent=8)
    best, aware, unaware = unlimited(work), simulate(work, PREFIX), simulate(work, policy)
    assert aware.cached_tokens >= 0.95 * best.cached_tokens
    assert unaware.cached_tokens <= 0.8 * best.cached_tokens
    assert aware.request_ratio <= 1.5
    assert aware.seconds < 0.9 * unaware.seconds


def test_pools_that_hold_half_of_the_conversations_each() -> None:
    # 40 conversations of about 1,600 tokens are 4,000 blocks: a pool of 2,400 holds them only if split.
    work = Work(Conversations(is_shared=False).chains(), max_concurrent=40, pause_s=0.5)
    best = unlimited(work)
    aware = simulate(work, PREFIX, num_blocks=2400)
    unaware = simulate(work, ROUND_ROBIN, num_blocks=2400)
    assert aware.cached_tokens >= 0.8 * best.cached_tokens
    assert unaware.cached_tokens <= 0.65 * best.cached_tokens


def one_prefix(
    num: int, *, answer: int = 32, prefix_tokens: int = 600, seed: int = 0
) -> list[tuple[list[int], list[int]]]:
    draw = random.Random(seed)

    def some(count: int) -> list[int]:
        return [draw.randrange(50_000) for _ in range(count)]

    prefix = some(prefix_tokens)
    return [(prefix + some(20), some(answer)) for _ in range(num)]


@pytest.mark.parametrize("answer", [1, 32, 128])
def test_requests_one_after_the_other_stay_where_their_prefix_is(answer: int) -> None:
    outcome = simulate(Work([one_prefix(20, answer=answer)], max_concurrent=1), PREFIX)
    assert len(set(outcome.placed)) == 1
    assert outcome.cached_tokens == 19 * 592  # 37 full blocks


@pytest.mark.parametrize("answer", [16, 64])
def test_a_popular_prefix_is_served_by_all_groups(answer: int) -> None:
    work = Work([[request] for request in one_prefix(40, answer=answer)], max_concurrent=40)
    aware, unaware = simulate(work, PREFIX), simulate(work, ROUND_ROBIN)
    assert min(aware.requests.values()) >= 10
    assert aware.seconds < 1.4 * unaware.seconds


def test_new_prompts_do_not_follow_the_warm_group() -> None:
    warm_up = one_prefix(10, seed=1)
    cold = [[one_prefix(1, seed=seed)[0]] for seed in range(100, 140)]
    outcome = simulate(Work([warm_up], max_concurrent=1), PREFIX)
    assert len(set(outcome.placed)) == 1
    # 40 at once with prompts of their own, after one group has served the ten.
    both = simulate(Work([warm_up + cold[0], *cold[1:]], max_concurrent=40), PREFIX)
    counts = Counter(both.placed)
    assert min(counts.values()) >= 13
    idle_first = simulate(Work(cold, max_concurrent=1), PREFIX)  # one at a time, nothing in common
    assert min(idle_first.requests.values()) >= 15
