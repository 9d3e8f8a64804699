"""Small parts alone: what a sequence hands to a slice, announced prefixes, plans run apart."""

from __future__ import annotations

import pytest

from tests.unit.engine.toy import VOCAB, ToyExecutor, make_request, numbers
from workers.engine.execution import run_plan
from workers.engine.prefixes import PrefixesInProgress
from workers.engine.request import EngineLimits, RequestState
from workers.engine.sequence import Sequence
from workers.engine.step import GroupFailed, SequenceSlice, SliceResult, StepPlan, StepResult
from workers.hashing import block_hashes
from workers.types import GenerateRequest, TokenLogprob

LIMITS = EngineLimits(vocab_size=VOCAB, max_model_len=1000, eos_token_ids=())


def _sequence(request: GenerateRequest, arrival: int = 1) -> Sequence:
    return Sequence(RequestState(request, limits=LIMITS, arrival=arrival, block_size=4), 0)


def test_tokens_and_hashes_run_over_the_border_of_prompt_and_output() -> None:
    sequence = _sequence(make_request("a", (1, 2, 3, 4, 5, 6), 10, cache_salt="s"))
    sequence.num_computed = 6
    for token_id in (7, 8, 9, 10, 11, 12):
        sequence.append(token_id)
        sequence.num_computed += 1
    known = tuple(range(1, 13))
    for start in range(12):
        for end in range(start + 1, 13):
            assert sequence.tokens(start, end) == known[start:end]
    assert [sequence.hash_of_block(index, 4) for index in range(3)] == block_hashes(known, 4, "s")


def test_append_refuses_a_token_out_of_turn() -> None:
    sequence = _sequence(make_request("a", (1, 2), 1))
    with pytest.raises(AssertionError, match="2 tokens not computed"):
        sequence.append(5)
    sequence.num_computed = 2
    sequence.append(5)
    sequence.num_computed = 3
    with pytest.raises(AssertionError, match="a token after the last one, 3"):
        sequence.append(5)


def test_scoring_reads_the_cache_only_as_far_as_it_has_scored() -> None:
    sequence = _sequence(make_request("a", numbers(12), 1, num_prompt_logprobs=0))
    assert sequence.prompt_scores == []
    assert (sequence.num_readable, sequence.chunk_end(100)) == (0, 12)
    assert sequence.score_targets(0, 7) == numbers(12)[1:8]
    sequence.prompt_scores.extend(TokenLogprob(token_id=token, logprob=-1.0) for token in numbers(12)[1:8])
    # Preempted after 7 scores, resumed from a cached block of 4: rows 4, 5, 6 are computed but not scored
    # again.
    sequence.num_computed = 4
    assert (sequence.num_readable, sequence.chunk_end(100), sequence.chunk_end(2)) == (7, 7, 6)
    assert sequence.score_targets(4, 7) is None
    sequence.num_computed = 7
    assert sequence.chunk_end(100) == 12
    assert sequence.score_targets(7, 12) == numbers(12)[8:12]  # the last row has no prompt token after it
    sequence.prompt_scores.extend(TokenLogprob(token_id=token, logprob=-1.0) for token in numbers(12)[8:])
    assert sequence.num_readable == 11
    assert sequence.score_targets(7, 12) is None


def test_an_announced_block_belongs_to_who_came_first() -> None:
    in_progress = PrefixesInProgress()
    first, second = (_sequence(make_request(name, numbers(12), 1), n) for n, name in enumerate("ab"))
    third = _sequence(make_request("c", (*numbers(8), 1, 2, 3, 4), 1), 3)
    in_progress.announce(first)
    in_progress.announce(second)
    in_progress.finish(second, second.hashes[0])  # not the owner: first still computes it
    assert in_progress.is_computing(first.hashes[0])
    assert in_progress.last_shared(third, 0, 2) == first.hashes[1]
    assert in_progress.last_shared(third, 2, 3) is None
    in_progress.finish(first, first.hashes[0])
    assert in_progress.last_shared(third, 0, 2) is None
    assert in_progress.last_shared(third, 1, 2) == first.hashes[1]
    in_progress.withdraw(second)
    assert len(in_progress) == 2
    first.num_sealed = 1
    in_progress.withdraw(first)
    assert len(in_progress) == 0


def _plan(num_slices: int) -> StepPlan:
    slices = [SequenceSlice(token_ids=(index,), start=0, block_table=(index,)) for index in range(num_slices)]
    return StepPlan(number=7, slices=slices, zero_blocks=(9, 8), copy_blocks=((0, 5),))


def test_slices_run_apart_after_an_exception_and_blocks_are_zeroed_first() -> None:
    executor = ToyExecutor(10, 4)

    def fail(plan: StepPlan) -> None:
        if any(piece.token_ids == (1,) for piece in plan.slices):
            raise OverflowError("slice 1")

    executor.before_step = fail
    outcomes = run_plan(executor, _plan(3))
    assert [type(outcome) for outcome in outcomes] == [SliceResult, OverflowError, SliceResult]
    assert [
        (plan.number, plan.zero_blocks, plan.copy_blocks, len(plan.slices)) for plan in executor.plans
    ] == [(7, (9, 8), ((0, 5),), 1), (7, (), (), 1)]


def test_the_first_slice_that_does_not_raise_has_the_blocks_zeroed() -> None:
    executor = ToyExecutor(10, 4)

    def fail(plan: StepPlan) -> None:
        if any(piece.token_ids == (0,) for piece in plan.slices):
            raise OverflowError("slice 0")

    executor.before_step = fail
    run_plan(executor, _plan(3))
    assert [plan.zero_blocks for plan in executor.plans] == [(9, 8), ()]


def test_a_single_slice_that_raises_is_that_slice_s_fault() -> None:
    executor = ToyExecutor(10, 4)

    def fail(plan: StepPlan) -> None:
        raise OverflowError("alone")

    executor.before_step = fail
    (outcome,) = run_plan(executor, _plan(1))
    assert isinstance(outcome, OverflowError)


def test_a_dead_group_and_a_short_answer_are_not_the_fault_of_a_slice() -> None:
    class ShortExecutor(ToyExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult(slices=())

    with pytest.raises(GroupFailed, match="step 7: 0 results for 2 slices"):
        run_plan(ShortExecutor(10, 4), _plan(2))
