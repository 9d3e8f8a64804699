from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from router.routing.load import LoadTracker
from router.routing.policy import (
    Choice,
    GroupLoad,
    PlacementPolicy,
    PolicyConfig,
    RequestView,
    rank,
    split_prompt,
)
from workers.types import GroupId, GroupStats, RequestId

A, B, C = GroupId("a"), GroupId("b"), GroupId("c")
CONFIG = PolicyConfig()
REQUEST = RequestView(num_prompt_tokens=1000, max_output_tokens=128, spread_key=b"prompt")


def load(group_id: GroupId, **changes: float) -> GroupLoad:
    idle = GroupLoad(
        group_id=group_id, block_size=16, prefill_tokens_per_s=4000.0, step_s=0.02, available_blocks=1000
    )
    return replace(idle, **changes)  # type: ignore[arg-type]  # test shorthand: fields by name


def order(choices: list[Choice]) -> list[GroupId]:
    return [choice.group_id for choice in choices]


def test_terms_are_milliseconds_and_add_up() -> None:
    busy = load(A, waiting_tokens=400, charged_tokens=100, num_running=3, num_waiting=1, charged_requests=1)
    (choice,) = rank(REQUEST, [busy], {A: 50}, CONFIG)
    assert choice.terms == {
        "queue": 125.0,  # 500 tokens at 4 a millisecond
        "prefill": 50.0,  # 200 uncached tokens
        "delay": 50.0,  # half as much for those who may come, a tenth for each of the 5 others
        "decode": pytest.approx(256.0),  # 128 steps of 20 ms, each 10 % longer for 5 others
        "context": 0.0,  # the group has not said what a token of it takes
        "memory": 0.0,
        "silent": 0.0,
        "balance": 0.0,
    }
    assert choice.cost_ms == pytest.approx(481.0)


def test_the_cached_prefix_decides_between_idle_groups() -> None:
    assert order(rank(REQUEST, [load(A), load(B)], {B: 40}, CONFIG)) == [B, A]


def test_a_queue_outweighs_a_prefix_that_is_shorter() -> None:
    owner = load(A, waiting_tokens=900)
    assert order(rank(REQUEST, [owner, load(B)], {A: 30}, CONFIG)) == [B, A]  # 480 cached save 180 ms
    assert order(rank(REQUEST, [owner, load(B)], {A: 50}, CONFIG)) == [A, B]  # 800 cached save 300 ms


def test_a_burst_of_equal_prompts_waits_for_the_first() -> None:
    first_is_there = load(A, charged_tokens=1000, charged_requests=1, own_requests=1)
    assert order(rank(REQUEST, [first_is_there, load(B)], {A: 62}, CONFIG)) == [A, B]


def test_running_sequences_outweigh_a_prefix_at_last() -> None:
    for num_running, best in ((0, A), (7, A), (8, B), (20, B)):
        loads = [load(A, num_running=num_running), load(B)]
        assert order(rank(REQUEST, loads, {A: 62}, CONFIG))[0] == best  # 992 tokens: 372 ms


def test_contexts_make_every_step_longer() -> None:
    busy = load(
        A, context_token_s=1e-6, running_tokens=7000, waiting_tokens=400, charged_tokens=100, num_running=3
    )
    (choice,) = rank(REQUEST, [busy], {}, CONFIG)
    # 128 steps read 7,500 tokens of the others, and for each of the three others our 1,000; all counts twice
    assert choice.terms["context"] == pytest.approx(2 * 128 * 1e-3 * (7500 + 3 * 1000))
    few = load(A, context_token_s=1e-6, num_running=2, running_tokens=2000)
    many = load(B, context_token_s=1e-6, num_running=2, running_tokens=3000)
    assert order(rank(REQUEST, [few, many], {B: 10}, CONFIG)) == [A, B]  # 256 ms against 160 cached tokens
    assert order(rank(REQUEST, [few, many], {B: 50}, CONFIG)) == [B, A]


def test_slow_groups_count_their_own_rates() -> None:
    slow, fast = load(A, prefill_tokens_per_s=500.0), load(B)
    assert order(rank(REQUEST, [slow, fast], {A: 40, B: 10}, CONFIG)) == [B, A]


def test_a_rate_that_is_hardly_known_counts_little() -> None:
    slow = load(A, prefill_tokens_per_s=1000.0, waiting_tokens=1000)  # the mean with B is 2500
    queues = []
    for trust in (0.0, 0.5, 1.0):
        ranked = rank(REQUEST, [replace(slow, rate_trust=trust), load(B)], {}, CONFIG)
        queues.append(next(choice.terms["queue"] for choice in ranked if choice.group_id == A))
    assert queues == pytest.approx([400.0, 1000.0 / (2500 * 0.4**0.5) * 1000, 1000.0])


def test_at_least_the_last_token_is_computed() -> None:
    assert split_prompt(32, 16, 2) == (16, 16)
    assert split_prompt(33, 16, 2) == (32, 1)
    assert split_prompt(1, 16, 0) == (0, 1)


def test_a_full_pool_costs_the_time_until_blocks_come_free() -> None:
    full = load(A, available_blocks=10, active_blocks=200)
    (choice,) = rank(REQUEST, [full], {}, CONFIG)
    missing = (1000 + 128) // 16 + 1 - 10
    assert choice.terms["memory"] == pytest.approx(128 * 20.0 * missing / 200)
    assert order(rank(REQUEST, [full, load(B)], {A: 10}, CONFIG)) == [B, A]


def test_a_silent_group_comes_last_whatever_it_has() -> None:
    loads = [load(A, silent_s=3.1), load(B, waiting_tokens=5000)]
    for policy in PlacementPolicy:
        config = replace(CONFIG, policy=policy)
        assert order(rank(replace(REQUEST, turn=0), loads, {A: 62}, config)) == [B, A]
    assert order(rank(REQUEST, [load(A, silent_s=2.9), load(B)], {A: 62}, CONFIG)) == [A, B]


def test_without_prefix_awareness_only_load_counts() -> None:
    config = replace(CONFIG, policy=PlacementPolicy.LEAST_LOADED)
    loads = [load(A, num_running=1), load(B)]
    assert order(rank(REQUEST, loads, {A: 62}, config)) == [B, A]


def test_round_robin_goes_on_by_one() -> None:
    config = replace(CONFIG, policy=PlacementPolicy.ROUND_ROBIN)
    loads = [load(C, waiting_tokens=9999), load(A), load(B)]
    orders = [order(rank(replace(REQUEST, turn=turn), loads, {A: 62}, config)) for turn in range(4)]
    assert orders == [[A, B, C], [B, C, A], [C, A, B], [A, B, C]]
    assert rank(REQUEST, [], {}, config) == []


def test_equal_costs_spread() -> None:
    loads = [load(A), load(B), load(C)]
    best = Counter(
        rank(replace(REQUEST, spread_key=bytes([key])), loads, {}, CONFIG)[0].group_id for key in range(240)
    )
    assert all(60 <= count <= 100 for count in best.values()) and len(best) == 3
    # The same prompt goes the same way from every router, whatever order it knows the groups in.
    assert order(rank(REQUEST, loads, {}, CONFIG)) == order(rank(REQUEST, loads[::-1], {}, CONFIG))
    # Fewer requests of ours go before the hash.
    assert order(rank(REQUEST, [load(A, own_requests=1), load(B)], {}, CONFIG)) == [B, A]


def test_recent_requests_decide_between_equals_and_replicate_a_prefix_late() -> None:
    for ahead, best in ((1, B), (0, A), (-1, A)):
        loads = [load(A, recent_requests=7 + ahead), load(B, recent_requests=7, own_requests=1)]
        assert order(rank(REQUEST, loads, {}, CONFIG))[0] == best
    for ahead, best in ((20, A), (21, B)):  # 480 cached tokens save 720, 35 are charged for each
        assert order(rank(REQUEST, [load(A, recent_requests=ahead), load(B)], {A: 30}, CONFIG))[0] == best
    (new, old) = rank(REQUEST, [load(A, recent_requests=1e9), load(B)], {}, CONFIG)
    assert (new.terms["balance"], old.terms["balance"]) == (0.0, 500.0)  # bounded


def test_groups_that_are_not_measured_yet_are_taken_to_be_like_the_others() -> None:
    loads = [load(A, prefill_tokens_per_s=40_000.0), load(B), load(C)]
    loads[1:] = [replace(entry, prefill_tokens_per_s=None, step_s=None) for entry in loads[1:]]
    assert {choice.cost_ms for choice in rank(REQUEST, loads, {}, CONFIG)} == {37.5}
    unknown = [replace(entry, prefill_tokens_per_s=None) for entry in loads]
    assert {choice.cost_ms for choice in rank(REQUEST, unknown, {}, CONFIG)} == {375.0}


# ---- what the router knows of a group's load


def tracker() -> LoadTracker:
    return LoadTracker(A, block_size=16, num_blocks=100)


def test_a_request_is_charged_until_the_stats_include_it() -> None:
    load_of_a, name = tracker(), RequestId("r")
    load_of_a.on_sent(name, 500, now_s=0.0)
    load_of_a.on_stats(GroupStats())  # not accepted yet: cannot be included
    view = load_of_a.view(0.0, 0.0)
    assert (view.charged_tokens, view.charged_requests, view.own_requests) == (500, 1, 1)
    load_of_a.on_accepted(name)
    load_of_a.on_stats(GroupStats(waiting_tokens=0))  # perhaps of a step that had begun before
    assert load_of_a.view(0.0, 0.0).charged_tokens == 500
    load_of_a.on_stats(GroupStats(waiting_tokens=500))
    view = load_of_a.view(0.0, 0.0)
    assert (view.charged_tokens, view.charged_requests, view.waiting_tokens) == (0, 0, 500)
    load_of_a.on_ended(name)
    load_of_a.on_ended(name)
    assert load_of_a.view(0.0, 0.0).own_requests == load_of_a.num_requests == 0


def test_the_first_token_ends_the_charge_and_measures_the_rate() -> None:
    load_of_a = tracker()
    load_of_a.on_sent(RequestId("r1"), 600, now_s=10.0)
    load_of_a.on_sent(RequestId("r2"), 400, now_s=10.0)
    load_of_a.on_token(RequestId("r2"), now_s=10.5)  # 1000 tokens in half a second
    load_of_a.on_token(RequestId("r2"), now_s=99.0)
    view = load_of_a.view(10.5, 0.0)
    assert (view.charged_tokens, view.prefill_tokens_per_s) == (600, 2000.0)
    load_of_a.on_ended(RequestId("r1"))
    load_of_a.on_sent(RequestId("short"), 20, now_s=11.0)
    load_of_a.on_token(RequestId("short"), now_s=20.0)  # too few tokens to tell
    assert load_of_a.view(20.0, 0.0).prefill_tokens_per_s == 2000.0


def test_rates_are_a_mean_in_which_the_first_ones_count_fully() -> None:
    load_of_a = tracker()
    assert load_of_a.view(0.0, 0.0).prefill_tokens_per_s is None
    means = []
    for number, seconds in enumerate((1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.1)):
        load_of_a.on_sent(RequestId(f"r{number}"), 1000, now_s=0.0)
        load_of_a.on_token(RequestId(f"r{number}"), now_s=seconds)
        load_of_a.on_ended(RequestId(f"r{number}"))
        means.append(load_of_a.view(0.0, 0.0).prefill_tokens_per_s)
    assert means[:3] == pytest.approx([1000.0, 1500.0, 4000.0 / 3])
    assert means[-1] == pytest.approx(0.8 * means[-2] + 0.2 * 10_000.0)
    assert load_of_a.view(0.0, 0.0).rate_trust == 7 / 9


def test_recent_requests_halve_every_five_minutes() -> None:
    load_of_a = tracker()
    load_of_a.on_sent(RequestId("r1"), 0, now_s=0.0)
    load_of_a.on_ended(RequestId("r1"))
    assert load_of_a.view(300.0, 0.0).recent_requests == pytest.approx(0.5)
    load_of_a.on_sent(RequestId("r2"), 0, now_s=300.0)
    assert load_of_a.view(600.0, 1.0).recent_requests == pytest.approx(0.75)
    assert load_of_a.view(600.0, 1.0).silent_s == 1.0
