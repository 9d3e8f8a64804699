"""Whole runs: times that can be worked out by hand, and runs that have to agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from cluster.figures.step_cost import StepCost
from cluster.figures.traces import TraceRequest
from cluster.simulate.peers import Network
from cluster.simulate.run import POLICIES, DoesNotFit, Outcome, SimConfig, simulate
from tests.unit.cluster.simulate.traces import PLAIN, UNEVEN, conversations
from workers.config import ScheduleConfig
from workers.types import Role

ONE: Mapping[Role, int] = {Role.UNIFIED: 1}
FAST = Network(bytes_per_s=1e9)


def config(
    groups: Mapping[Role, int], *, cost: StepCost = UNEVEN, num_blocks: int = 400, **changes: object
) -> SimConfig:
    base = SimConfig(groups=groups, cost=cost, num_blocks=num_blocks)
    return replace(base, **changes)  # type: ignore[arg-type]  # test shorthand: fields by name


def request(number: int, arrival_s: float, prompt: int, output: int, *ids: int) -> TraceRequest:
    return TraceRequest(
        number=number, arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, prefix_ids=ids
    )


def times(outcome: Outcome) -> list[tuple[float, float]]:
    return [(served.first_s or -1.0, served.end_s or -1.0) for served in outcome.served]


def essence(outcome: Outcome) -> list[object]:
    """Everything that is not real time, memory, or the number of events it took."""
    found: list[object] = [
        (served.request.number, served.group_id, served.first_s, served.end_s, served.cached_tokens)
        for served in outcome.served
    ]
    return [
        *found,
        tuple(outcome.num_requests),
        outcome.num_steps,
        outcome.num_preemptions,
        outcome.pulled_tokens,
    ]


# ---- by hand


def test_groups_of_one_machine_slow_each_other_down() -> None:
    # The second prompt begins while the first is computed, the first's rows while the second is.
    doubled = replace(PLAIN, overhead_s=0.002, token_s=0.002, row_s=0.001)
    two = config({Role.UNIFIED: 2}, cost=PLAIN, crowded_cost=doubled)
    outcome = simulate([request(number, 2.0, 20, 3) for number in range(2)], two, "round_robin")
    assert times(outcome) == [
        (pytest.approx(2.021), pytest.approx(2.031)),
        (pytest.approx(2.042), pytest.approx(2.047)),
    ]


def test_one_request() -> None:
    # 20 prompt tokens: 1 ms + 20 ms; then two steps of one row: 1 + 1 + 0.5 ms.
    outcome = simulate([request(0, 2.0, 20, 3)], config(ONE, cost=PLAIN), "prefix")
    assert times(outcome) == [(pytest.approx(2.021), pytest.approx(2.026))]
    assert (outcome.num_steps, outcome.busy_s) == (3, [pytest.approx(0.026)])


def test_chunks_and_rows_share_a_step() -> None:
    # Budget 16. The first one computes 16 tokens (17 ms), then 4 (5 ms), with 12 of the second beside them:
    # 1 + 16 ms. The step after has its row and the last 8 tokens: 1 + 1 + 0.5 + 8 ms. Then two rows: 4 ms.
    requests = [request(0, 0.0, 20, 3), request(1, 0.001, 20, 2)]
    outcome = simulate(
        requests, config(ONE, cost=PLAIN, schedule=ScheduleConfig(max_step_tokens=16)), "prefix"
    )
    assert times(outcome) == [
        (pytest.approx(0.034), pytest.approx(0.0485)),
        (pytest.approx(0.0445), pytest.approx(0.0485)),
    ]
    assert outcome.num_steps == 4


def test_what_is_cached_is_not_computed() -> None:
    # 64 tokens, the first 48 of them are those of the request before: three blocks of 16.
    before = replace(request(0, 0.0, 48, 1, 1, 2), tokens_per_id=24)
    after = replace(request(1, 1.0, 64, 1, 1, 2, 3), tokens_per_id=24)
    outcome = simulate([before, after], config(ONE, cost=PLAIN), "prefix")
    assert [served.cached_tokens for served in outcome.served] == [0, 48]
    assert times(outcome)[1] == (pytest.approx(1.017), pytest.approx(1.017))


def test_the_second_of_two_equal_prompts_follows_the_first_or_not() -> None:
    pair = [request(0, 0.0, 320, 200, 1), request(1, 3.0, 320, 1, 1)]
    two = {Role.UNIFIED: 2}
    assert len({served.group_id for served in simulate(pair, config(two), "prefix").served}) == 1
    assert len({served.group_id for served in simulate(pair, config(two), "round_robin").served}) == 2


def test_a_prefill_group_hands_its_blocks_over() -> None:
    # Prefill computes 320 tokens: 321 ms. Decode reads the 19 blocks that it may: 19 x 16 x 1000 bytes at
    # 10 MB a second, 30.4 ms, with a message each way that costs nothing; then it computes 16 tokens: 17 ms.
    pools = {Role.PREFILL: 1, Role.DECODE: 1}
    network = Network(bytes_per_s=1e7, latency_s=0.0)
    setup = config(
        pools, cost=PLAIN, network=network, kv_bytes_per_token=1000,
        schedule=ScheduleConfig(max_step_tokens=320),
    )  # fmt: skip
    setup = replace(
        setup, router=replace(setup.router, default_transfer_bytes_per_s=1e7, interference_weight=2.0)
    )
    outcome = simulate([request(0, 0.0, 320, 1, 1)], setup, "prefix")
    assert outcome.pulled_tokens == 304
    assert times(outcome)[0][0] == pytest.approx(0.321 + 0.0304 + 0.017)
    assert outcome.served[0].cached_tokens == 0  # nobody had them before


# ---- agreement


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_arguments_come_to_the_same(policy: str) -> None:
    setup = config({Role.UNIFIED: 3})
    runs = [simulate(conversations(15), setup, policy) for _ in range(2)]
    assert essence(runs[0]) == essence(runs[1])
    assert len(runs[0].served) == 45


@pytest.mark.parametrize(
    ("groups", "num_blocks", "network", "max_step_tokens"),
    [
        (ONE, 400, None, 64),
        (ONE, 60, None, 64),  # evicts, and preempts
        ({Role.UNIFIED: 3}, 150, FAST, 512),
        ({Role.PREFILL: 1, Role.DECODE: 2}, 150, FAST, 128),
        ({Role.PREFILL: 2, Role.DECODE: 1}, 80, replace(FAST, bytes_per_s=1e8), 128),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_leaps_come_to_the_same_as_steps(
    groups: Mapping[Role, int], num_blocks: int, network: Network | None, max_step_tokens: int, seed: int
) -> None:
    trace = conversations(15, rate=3.0, seed=seed, output=120)
    setup = config(
        groups,
        num_blocks=num_blocks,
        network=network,
        schedule=ScheduleConfig(max_step_tokens=max_step_tokens),
    )
    leaping = simulate(trace, setup, "prefix")
    stepping = simulate(trace, replace(setup, can_leap=False), "prefix")
    assert essence(leaping) == essence(stepping)
    assert leaping.busy_s == pytest.approx(stepping.busy_s)
    assert leaping.num_events < stepping.num_events


def test_every_request_ends_once_even_when_memory_is_short() -> None:
    trace = conversations(20, rate=20.0, output=200)
    outcome = simulate(trace, config(ONE, num_blocks=60), "prefix")  # asserts that pools are sound
    roomy = simulate(trace, config(ONE, num_blocks=4000), "prefix")
    assert outcome.hit_tokens < roomy.hit_tokens  # blocks were evicted
    assert sorted(served.request.number for served in outcome.served) == list(range(60))
    assert all(served.refusal is None and served.end_s is not None for served in outcome.served)
    assert sum(outcome.num_requests) == 60


def test_refused_requests_end_too() -> None:
    crowd = [request(number, 0.0, 100, 5) for number in range(10)]
    outcome = simulate(crowd, config(ONE, schedule=ScheduleConfig(max_waiting=4, max_running=1)), "prefix")
    refused = [served.refusal for served in outcome.served if served.refusal is not None]
    assert refused == ["queue_full"] * 6
    assert sum(served.num_tokens for served in outcome.served) == 20


def test_clusters_that_cannot_serve_are_named() -> None:
    long = [request(0, 0.0, 10, 5), request(1, 0.0, 6395, 6)]
    with pytest.raises(
        DoesNotFit, match=r"request 1 has 6,395 \+ 6 tokens, in 401 KV blocks; a group has 400"
    ):
        simulate(long, config(ONE), "prefix")
    with pytest.raises(DoesNotFit, match="no group answers"):
        simulate(long, config({Role.PREFILL: 1}, network=FAST), "prefix")
    with pytest.raises(DoesNotFit, match="a network between the groups is needed"):
        simulate(long[:1], config({Role.PREFILL: 1, Role.DECODE: 1}), "prefix")
