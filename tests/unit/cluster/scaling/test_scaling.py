"""How many groups: each reason alone, damping, pools together, and whole bursts in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU, StepCost
from cluster.scaling.decide import decide
from cluster.scaling.targets import ScalingTargets
from cluster.scaling.view import Memory, PoolView
from tests.unit.cluster.scaling.scaling_world import World, reversals_s, targets_of, view
from workers.data_plane.signals import GroupSignals, SignalWindow
from workers.types import GroupStats, Role

# 1000 prompt tokens a second and group; a step of decode rows takes 10 ms and 1 ms a row.
COST = StepCost(
    overhead_s=0.0, weights_s=0.01, token_s=0.001, row_s=0.0, context_token_s=0.0, pair_s=0.0, blend=1.0
)
RATE = COST.prefill_tokens_per_s(512)
TARGETS = ScalingTargets(
    ttft_s=1.0, drain_s=2.0, tpot_s=0.05, headroom=0.5, scale_down_after_s=60.0, min_reversal_s=60.0
)


def after(
    pool: PoolView, seconds: int, memory: Memory | None = None, start_s: float = 0.0
) -> tuple[int, str, Memory]:
    """What is decided when nothing but the pool's own size changes, asked once a second."""
    memory = memory or Memory()
    reason = ""
    for second in range(seconds + 1):
        decision = decide({"unified": pool}, TARGETS, COST, memory, start_s + second)
        memory = decision.memory
        found = decision.pools["unified"]
        reason = found.reason
        pool = replace(pool, target=found.target)
    return pool.target, reason, memory


def test_each_reason_asks_for_its_groups() -> None:
    def terms(**signal: float) -> dict[str, float]:
        decision = decide({"unified": view(**signal)}, TARGETS, COST, Memory(), 0.0)
        return {name: round(value, 2) for name, value in decision.pools["unified"].terms.items() if value}

    assert terms() == {}
    # Within two seconds, by groups planned for half of their time.
    assert terms(queue_tokens=2 * RATE) == {"queue": 2.0}
    assert terms(arriving_tokens_per_s=1.5 * RATE) == {"arrivals": 3.0}
    assert terms(kv_use=0.8) == {"memory": 1.0}
    # 90 sequences, of which 40 have steps of 50 ms.
    assert terms(running=90, step_rows=90, step_s=0.1) == {"decode": 3.0, "tpot": 2.0}
    # Half of the time goes to prompts: steps of 25 ms, 15 sequences.
    busy = terms(running=30, arriving_tokens_per_s=RATE, step_rows=30, step_s=0.04)
    assert busy["decode"] == 2.0
    assert terms(ttft_s=1.5) == {"ttft": 2.0}


def test_a_slower_machine_than_was_calibrated_needs_more_groups() -> None:
    memory = Memory()
    pool = view(running=10, step_rows=10, step_s=0.08)  # predicted: 20 ms
    for second in range(40):
        memory = decide({"unified": pool}, TARGETS, COST, memory, second).memory
    assert memory.slowness == pytest.approx(4.0, rel=0.01)
    # 40 ms of a step are left to weights, so the rows may have 10: 2 of 4 ms.
    decision = decide({"unified": pool}, TARGETS, COST, memory, 40.0)
    assert decision.pools["unified"].terms["decode"] == 5.0


def test_up_at_once_down_after_a_while_and_never_beyond_the_bounds() -> None:
    assert after(view(queue_tokens=5 * RATE), 0)[:2] == (5, "up")
    assert after(view(queue_tokens=50 * RATE), 0)[0] == 8
    quiet = view(target=4, running=1)
    size, reason, memory = after(quiet, 59)
    assert (size, reason) == (4, "fewer would do, waiting 1 s")
    assert after(quiet, 1, memory, 60.0)[0] == 1
    assert after(view(target=4, least=3, running=1), 100)[0] == 3


def test_a_pool_just_large_enough_is_not_made_smaller() -> None:
    pool = view(target=4, arriving_tokens_per_s=RATE * 0.5 * 2.9 / 4)
    assert after(pool, 300)[:2] == (4, "enough, without margin")
    assert after(view(target=4, arriving_tokens_per_s=RATE * 0.5 * 2.5 / 4), 300)[0] == 3


def test_two_changes_of_direction_are_a_minute_apart() -> None:
    size, _, memory = after(view(target=4, running=1), 60)
    assert size == 1
    busy = view(target=1, queue_tokens=3 * RATE)
    size, reason, memory = after(busy, 58, memory, 61.0)
    assert (size, reason) == (1, "up in 1 s, after the last change")
    assert after(busy, 1, memory, 120.0)[0] == 3


def test_to_zero_when_idle_and_back_when_wanted() -> None:
    idle = view(target=1, least=0)
    size, _, memory = after(idle, 119)
    assert size == 1
    size, _, memory = after(idle, 1, memory, 120.0)
    assert size == 0
    zero = PoolView(role=Role.UNIFIED, target=0, least=0, most=4)
    size, _, memory = after(zero, 500, memory, 122.0)
    assert size == 0
    decision = decide({"unified": replace(zero, num_wanting=3.0)}, TARGETS, COST, memory, 700.0)
    assert decision.pools["unified"].target == 1
    assert decision.pools["unified"].terms["wanting"] == 1.0
    # The request that it was for has not come to it yet.
    assert after(idle, 100, decision.memory, 701.0)[0] == 1
    assert after(view(target=1, least=1), 500)[0] == 1


def test_a_change_that_serve_made_counts_as_one() -> None:
    _, _, memory = after(view(target=1, least=0), 120)
    woken = view(target=1, least=0, running=1)  # a second after the pool went to zero
    decision = decide({"unified": woken}, TARGETS, COST, memory, 122.0)
    pool = decision.memory.pools["unified"]
    assert (pool.direction, pool.changed_s) == (1, 122.0)


def test_prefill_and_decode_scale_together() -> None:
    def sizes(ratio: float | None, prefill_queue: float, rows: float) -> dict[str, int]:
        pools = {
            "prefill": view(Role.PREFILL, queue_tokens=prefill_queue * RATE),
            "decode": view(Role.DECODE, running=rows, step_rows=rows, step_s=0.01 + 0.001 * rows),
        }
        targets = replace(TARGETS, prefill_per_decode=ratio, settle_s=0.0)
        return targets_of(pools, decide(pools, targets, COST, Memory(), 0.0))

    assert sizes(None, 4.0, 30) == {"prefill": 4, "decode": 1}
    assert sizes(1.0, 4.0, 30) == {"prefill": 4, "decode": 4}
    assert sizes(2.0, 4.0, 30) == {"prefill": 4, "decode": 2}
    assert sizes(0.5, 1.0, 115) == {"prefill": 2, "decode": 3}


def test_prompts_that_decode_groups_compute_are_work_of_the_prefill_pool() -> None:
    pools = {
        "prefill": PoolView(role=Role.PREFILL, target=0, least=0, most=4),
        "decode": view(Role.DECODE, queue_tokens=0.9 * RATE, running=1),
    }
    assert targets_of(pools, decide(pools, TARGETS, COST, Memory(), 0.0)) == {"prefill": 1, "decode": 1}


def test_signals_are_of_the_last_ten_seconds() -> None:
    now = [0.0]
    window = SignalWindow(lambda: now[0], {"target_ttft_s": 2.0})
    stats = GroupStats(free_blocks=8, active_blocks=2)
    for second in range(30):
        now[0] = float(second)
        stats = replace(
            stats,
            prompt_tokens_total=100 * second,
            cached_tokens_total=40 * second,
            generated_tokens_total=10 * second,
            waiting_tokens=7 * second,
            num_steps=5 * second,
            step_seconds_total=0.1 * second,
            first_tokens_total=second,
            first_token_seconds_total=0.5 * second if second < 15 else 7.5 + 2.0 * (second - 15),
        )
        numbers = window.numbers(stats)
    assert numbers["target_ttft_s"] == 2.0
    found = GroupSignals.of(numbers)
    assert found.arriving_tokens_per_s == pytest.approx(67.0)
    expected = (pytest.approx(0.02), pytest.approx(12.0), pytest.approx(2.0))
    assert (found.step_s, found.step_prompt_tokens, found.step_rows) == expected
    assert (found.ttft_s, found.kv_use) == (pytest.approx(2.0), pytest.approx(0.2))


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_is_answered_in_time_and_sizes_do_not_flap(seed: int) -> None:
    """One request a second, for two minutes nine, then one again: the rate of nine needs several groups."""
    targets = ScalingTargets(ttft_s=1.0, tpot_s=0.1)
    world = World(targets=targets, cost=COST, seed=seed)
    world.run(500.0, lambda s: 9.0 if 60.0 <= s < 180.0 else 1.0)
    changes = world.sizes()
    assert changes[0][0] < 66.0, "up within seconds"
    assert 3 <= max(size for _, size in changes) <= 7
    assert changes[-1][1] == 1
    turns = reversals_s(changes, 1)
    assert all(later - earlier >= 60.0 for earlier, later in pairwise(turns))
    assert world.mean_ttft_s(90.0, 180.0) <= targets.ttft_s  # when the new groups are there
    assert world.mean_ttft_s(180.0, 500.0) <= targets.ttft_s
    assert all(request.first_s is not None for request in world.done if request.came_s < 490.0)


def test_a_load_that_swings_faster_than_a_minute_does_not_make_sizes_swing() -> None:
    world = World(targets=ScalingTargets(), cost=COST)
    world.run(400.0, lambda s: 8.0 if int(s) % 30 < 15 else 0.5)
    turns = reversals_s(world.sizes(), 1)
    assert len(turns) <= 3
    assert all(later - earlier >= 60.0 for earlier, later in pairwise(turns))
    assert world.mean_ttft_s(60.0, 400.0) <= 1.0


def test_a_cost_of_another_machine_is_corrected_by_what_is_measured() -> None:
    believed = replace(COST, weights_s=COST.weights_s / 5, token_s=COST.token_s / 5)
    world = World(targets=ScalingTargets(), cost=COST, believed=believed)
    world.run(200.0, lambda s: 8.0 if s >= 20.0 else 0.5)
    assert world.mean_ttft_s(120.0, 200.0) <= 1.0
    assert 2.5 <= world.memory.slowness <= 7.5


def test_from_zero_and_back() -> None:
    world = World(targets=replace(ScalingTargets(), idle_to_zero_s=60.0), cost=COST, least=0, most=3)
    world.run(300.0, lambda s: 2.0 if 50.0 <= s < 110.0 else 0.0)
    sizes = [size for _, size in world.sizes()]
    assert sizes[0] == 1 and sizes[-1] == 0 and max(sizes) <= 3
    assert all(request.first_s is not None for request in world.done)


def test_the_default_cost_is_usable() -> None:
    world = World(targets=ScalingTargets(), cost=SMOLLM2_ON_SMALL_CPU)
    world.run(30.0, lambda _: 2.0)
    assert world.sizes() == [] or max(size for _, size in world.sizes()) <= 2
