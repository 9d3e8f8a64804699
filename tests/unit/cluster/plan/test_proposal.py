"""How many groups are proposed, and what they are expected to do, against queueing theory and by hand."""

import math

import pytest

from cluster.figures.step_cost import StepCost
from cluster.figures.traces import TraceRequest
from cluster.plan.demand import Demand, Targets, TooLong, of_trace
from cluster.plan.proposal import GroupLimits, NotReachable, propose_apart, propose_unified
from cluster.plan.queueing import PrefillQueue

# A prompt of 100 tokens takes a second, a decode step 10 ms whatever is in it.
COST = StepCost(
    overhead_s=0.0, weights_s=0.01, token_s=0.01, row_s=0.0, context_token_s=0.0, pair_s=0.0, blend=1e9
)
FLAT = StepCost(
    overhead_s=0.01, weights_s=0.0, token_s=1e-5, row_s=0.0, context_token_s=0.0, pair_s=0.0, blend=1.0
)


def group(cost: StepCost = FLAT, *, pool_tokens: int = 100_000, max_running: int = 128) -> GroupLimits:
    return GroupLimits(
        cost=cost,
        tensor_parallel=1,
        devices=1,
        step_tokens=512,
        pool_tokens=pool_tokens,
        max_running=max_running,
    )


def demand(rate: float, prompt: int = 100, output: int = 50) -> Demand:
    return Demand(rate=rate, lengths=[(prompt, output)], source="a test")


def test_equal_prompts_wait_as_in_m_d_1() -> None:
    queue = PrefillQueue.of(demand(0.5), COST, step_tokens=512)
    assert (queue.mean_s, queue.mean_square_s2, queue.p90_s) == (1.0, 1.0, 1.0)
    assert queue.busy(0.5) == 0.5
    # M/D/1: mean wait u / (2 (1 - u)) services = 0.5 s; a tenth of the waits is beyond (0.5 / u) ln(10 u).
    assert queue.ttft_p90_s(0.5) == pytest.approx(1.0 + math.log(5))
    assert queue.ttft_p90_s(0.05) == 1.0  # nine of ten do not wait at all
    assert queue.ttft_p90_s(1.0) == math.inf


def test_slower_steps_shift_all_moments() -> None:
    mixed = Demand(rate=1, lengths=[(100, 1), (1024, 1), (300, 1)], source="")
    slowed = PrefillQueue.of(mixed, COST, step_tokens=512).slowed(0.25)
    times = [COST.prefill_seconds(prompt) + 0.25 * prompt / 512 for prompt, _ in mixed.lengths]
    assert slowed.mean_s == pytest.approx(sum(times) / 3)
    assert slowed.mean_square_s2 == pytest.approx(sum(time * time for time in times) / 3)
    assert slowed.p90_s == pytest.approx(max(times))


def test_apart_each_pool_is_sized_for_itself() -> None:
    found = propose_apart(demand(5.0), Targets(ttft_s=3.0, tpot_s=0.5), group(COST))
    prefill, decode = found.pools
    assert (prefill.role, decode.role) == ("prefill", "decode")
    queue = PrefillQueue.of(demand(5.0), COST, step_tokens=512)
    step_s = found.tpot_s
    assert queue.ttft_p90_s(5.0 / prefill.groups) + step_s <= 3.0
    assert queue.ttft_p90_s(5.0 / (prefill.groups - 1)) + step_s > 3.0
    # 250 tokens/s are wanted; a step of b rows takes b x 10 ms, so that a group gives 100 tokens/s.
    assert decode.groups == 3
    assert decode.batch / COST.decode_step_seconds(decode.batch, 0) >= 250 / 3 * 0.99
    assert found.devices == prefill.groups + 3
    common = math.gcd(prefill.groups, decode.groups)
    assert found.ratio == f"{prefill.groups // common}:{decode.groups // common}"


def test_the_batch_keeps_within_target_pool_and_headroom() -> None:
    # Steps of 10 ms and 10 us a row: 20 ms allow 1000 rows, the pool 60 and max_running 128.
    asked = demand(40.0)
    small = propose_apart(asked, Targets(ttft_s=1, tpot_s=0.02), group(pool_tokens=9000)).pools[1]
    large = propose_apart(asked, Targets(ttft_s=1, tpot_s=0.02), group(pool_tokens=90_000)).pools[1]
    assert small.batch <= 0.85 * 60
    assert large.batch <= 0.85 * 128
    assert small.groups >= large.groups == 1
    # Little's law: rows at once = tokens a second x seconds a token.
    assert large.batch == pytest.approx(40.0 * 50 * FLAT.decode_step_seconds(large.batch, 125), rel=1e-6)


def test_one_pool_settles_where_steps_are_shared() -> None:
    found = propose_unified(demand(10.0), Targets(ttft_s=0.5, tpot_s=0.05), group())
    (pool,) = found.pools
    assert (pool.role, pool.groups, found.ratio) == ("unified", 1, "")
    assert pool.batch == pytest.approx(10.0 * 50 * found.tpot_s, rel=1e-4)
    assert 0.01 < found.tpot_s < 0.013  # a little above the bare step
    assert found.longest_gap_s > FLAT.prefill_seconds(512)
    more = propose_unified(demand(200.0), Targets(ttft_s=0.5, tpot_s=0.05), group())
    assert more.pools[0].groups > 1


@pytest.mark.parametrize("propose", [propose_unified, propose_apart])
def test_what_cannot_be_reached_says_why(propose) -> None:
    with pytest.raises(NotReachable, match=r"TTFT: .* takes 1 s or more .* 0.5 s are allowed"):
        propose(demand(1.0), Targets(ttft_s=0.5, tpot_s=1), group(COST))
    with pytest.raises(NotReachable, match=r"TPOT: a request alone takes 10 ms a token, 5 ms are allowed"):
        propose(demand(1.0), Targets(ttft_s=5, tpot_s=0.005), group())
    with pytest.raises(NotReachable, match="a KV pool of 100 tokens holds no request"):
        propose(demand(1.0), Targets(ttft_s=5, tpot_s=1), group(pool_tokens=100))


def test_no_pool_is_larger_than_deployment_files_may_say() -> None:
    plenty = Targets(ttft_s=1e6, tpot_s=1)
    with pytest.raises(NotReachable, match="one pool of up to 1,024 groups misses a target"):
        propose_unified(demand(2000.0), plenty, group(COST))
    with pytest.raises(NotReachable, match="1,024 prefill groups do not reach TTFT"):
        propose_apart(demand(2000.0), plenty, group(COST))
    with pytest.raises(NotReachable, match="decode groups would be needed, a pool has at most 1,024"):
        propose_apart(demand(1e6), plenty, group(max_running=1))


def test_a_trace_is_planned_for_its_busiest_minute() -> None:
    times = [*range(0, 60, 10), *(60 + i for i in range(30)), 200]
    requests = [
        TraceRequest(number=i, arrival_s=at, prompt_tokens=100 + i, output_tokens=10)
        for i, at in enumerate(times)
    ]
    found = of_trace(requests, "a.csv")
    assert found.rate == 0.5
    assert len(found.lengths) == 37 and found.mean_output == 10
    assert found.within(146) == found
    shorter = found.within(145)
    assert (len(shorter.lengths), shorter.refused_share) == (36, pytest.approx(1 / 37))
    assert shorter.rate == pytest.approx(0.5 * 36 / 37)
    with pytest.raises(TooLong, match=r"97.3% of the requests .* --context 146 holds all of them"):
        found.within(110)
    short = of_trace(requests[:3], "a.csv")
    assert short.rate == 3 / 20
