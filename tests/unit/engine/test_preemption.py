"""Who is preempted, from hand-made states; and how demand is estimated."""

from __future__ import annotations

from tests.unit.engine.toy import VOCAB, make_request, numbers
from workers.engine.block_pool import BlockPool
from workers.engine.demand import OutputLengthEstimate
from workers.engine.preemption import choose_victim, lost_tokens
from workers.engine.request import EngineLimits, RequestState
from workers.engine.sequence import Sequence

LIMITS = EngineLimits(vocab_size=VOCAB, max_model_len=1000, eos_token_ids=())


def _sequence(
    arrival: int, num_tokens: int, *, max_tokens: int = 8, priority: int = 0, ignore_eos: bool = False
) -> Sequence:
    request = make_request(
        str(arrival), numbers(num_tokens, arrival), max_tokens, priority=priority, ignore_eos=ignore_eos
    )
    return Sequence(RequestState(request, limits=LIMITS, arrival=arrival, block_size=4), 0)


def _running(
    pool: BlockPool, arrival: int, num_tokens: int, shared: list[int] | None = None, priority: int = 0
) -> Sequence:
    sequence = _sequence(arrival, num_tokens, priority=priority)
    sequence.num_computed = num_tokens
    for block in shared or []:
        pool.share(block)
        sequence.block_table.append(block)
    while len(sequence.block_table) * 4 < num_tokens:
        sequence.block_table.append(pool.allocate())
    return sequence


def test_lost_tokens_are_those_after_the_last_shared_block() -> None:
    pool = BlockPool(20)
    alone = _running(pool, 1, 10)
    pool.seal(alone.block_table[0], alone.hashes[0])
    assert lost_tokens(alone, pool, 4) == 10
    sharing = _running(pool, 2, 7, shared=alone.block_table[:1])
    assert (lost_tokens(alone, pool, 4), lost_tokens(sharing, pool, 4)) == (6, 3)
    shadow = _running(pool, 3, 4, shared=sharing.block_table[:1])
    assert lost_tokens(shadow, pool, 4) == 0  # frees nothing


def test_least_lost_work_then_latest_arrival_and_never_the_first() -> None:
    pool = BlockPool(40)
    first, second = _running(pool, 1, 2), _running(pool, 2, 9)
    third, fourth = _running(pool, 3, 6), _running(pool, 4, 6)
    running = [second, fourth, first, third]
    assert choose_victim(second, running, pool, 4) is fourth
    assert choose_victim(second, [second, first, third], pool, 4) is third
    assert choose_victim(first, [second, first], pool, 4) is second
    assert choose_victim(second, [second, first], pool, 4) is second  # itself


def test_priority_comes_before_lost_work_and_nobody_preempts_a_more_urgent_one() -> None:
    pool = BlockPool(40)
    first, cheap = _running(pool, 1, 9), _running(pool, 2, 2)
    costly = _running(pool, 3, 12, priority=1)
    running = [first, cheap, costly]
    assert choose_victim(first, running, pool, 4) is costly
    assert choose_victim(costly, running, pool, 4) is costly
    assert choose_victim(cheap, running, pool, 4) is costly


def test_one_that_frees_nothing_is_the_last_choice() -> None:
    pool = BlockPool(40)
    first, second = _running(pool, 1, 9), _running(pool, 2, 12)
    pool.seal(second.block_table[0], second.hashes[0])
    empty = _running(pool, 3, 4, shared=second.block_table[:1])
    assert choose_victim(first, [first, second, empty], pool, 4) is second
    assert choose_victim(first, [first, empty], pool, 4) is empty


def test_expected_blocks_follow_mean_limit_and_progress() -> None:
    estimate = OutputLengthEstimate(block_size=4, first_guess=6)
    sequence = _sequence(1, 10, max_tokens=100)
    assert estimate.expected_blocks(sequence) == 4  # 10 + 6
    assert estimate.expected_blocks(_sequence(1, 10, max_tokens=3)) == 3  # 10 + 3 - 1
    assert estimate.expected_blocks(_sequence(1, 12, max_tokens=0)) == 3
    assert estimate.expected_blocks(_sequence(1, 10, max_tokens=100, ignore_eos=True)) == 28  # known: 109
    sequence.output.extend(range(9))  # longer than the mean: another block is expected
    assert estimate.expected_blocks(sequence) == 6  # 10 + 9 + 4


def test_the_estimate_follows_what_ended_and_a_cut_one_never_lowers_it() -> None:
    estimate = OutputLengthEstimate(block_size=4, first_guess=100)
    estimate.observe(1, was_cut=True)
    assert estimate.mean == 100
    estimate.observe(40, was_cut=False)
    assert estimate.mean == 90  # (100 * 5 + 40) / 6
    estimate.observe(230, was_cut=True)
    assert estimate.mean == 110
    for _ in range(400):
        estimate.observe(7, was_cut=False)
    assert round(estimate.mean, 3) == 7
