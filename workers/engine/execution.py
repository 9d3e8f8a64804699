"""Runs a plan so that an exception in one slice ends that slice and not the step, and checks what comes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from workers.decoding.beam_search import Candidate
from workers.engine.step import Executor, GroupFailed, SequenceSlice, SliceResult, StepPlan, StepResult
from workers.types import INVALID_GRAMMAR, TOO_BUSY

Outcome = SliceResult | Exception  # what a slice gave, or why it gave nothing
Outcomes = Sequence[Outcome]


def run_plan(executor: Executor, plan: StepPlan) -> Outcomes:
    """One outcome per slice. Raises GroupFailed when the group cannot compute any more."""
    try:
        return slices_of(executor.execute(plan), plan)
    except GroupFailed:
        raise
    except Exception as error:
        return run_apart(executor, plan, error)


def run_apart(executor: Executor, plan: StepPlan, error: Exception) -> Outcomes:
    """What comes of the slices of a plan that has raised this: each runs in a step of its own.

    A plan is complete in itself and writes the same keys and values again, so the good ones lose nothing but
    time. If two or more slices all raise, the executor is broken and not a request: GroupFailed.
    """
    if len(plan.slices) == 1:
        return [error]
    outcomes: list[Outcome] = []
    has_prepared = False
    for index in range(len(plan.slices)):
        outcomes.append(_run_alone(executor, plan.alone(index, prepares_blocks=not has_prepared)))
        # A run that raised may have zeroed and copied nothing; one that did not has done it all. What a
        # slice wrote before into a block that is copied again, it or the owner of the copy writes anew.
        has_prepared |= not isinstance(outcomes[-1], Exception)
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if len(failed) == len(outcomes):
        first = failed[0]
        raise GroupFailed(f"each of {len(failed)} sequences fails, the first with {first!r}") from first
    return outcomes


def slices_of(result: StepResult, plan: StepPlan) -> Sequence[SliceResult]:
    """The results of a plan, one a slice, or GroupFailed."""
    if len(result.slices) != len(plan.slices):
        raise GroupFailed(f"step {plan.number}: {len(result.slices)} results for {len(plan.slices)} slices")
    return result.slices


class Failure(NamedTuple):
    """Why a slice came to nothing."""

    code: str  # for the client, as the message
    message: str
    detail: str  # for the log
    cause: Exception | None = None

    @property
    def is_sound(self) -> bool:
        """Whether what the sequence has computed can be trusted all the same: only its grammar fails."""
        return self.code in (INVALID_GRAMMAR, TOO_BUSY)


def failure_of(piece: SequenceSlice, outcome: Outcome, vocab_size: int) -> Failure | None:
    """None when the outcome is a result that can be used."""
    if isinstance(outcome, Exception):
        message = f"The engine failed on this request ({type(outcome).__name__}) and ended it."
        return Failure("internal_error", message, "the step raised", outcome)
    if outcome.error is not None:
        return Failure(outcome.error_code, outcome.error, outcome.error)
    problem = _problem_with(piece, outcome, vocab_size)
    if problem is not None:
        return Failure("internal_error", "The engine failed on this request and ended it.", problem)
    return None


def _problem_with(piece: SequenceSlice, result: SliceResult, vocab_size: int) -> str | None:
    """What is wrong with a result, whatever its values: a bug of the executor."""
    has_scores = piece.prompt_targets is not None or result.prompt_logprobs
    if has_scores and len(result.prompt_logprobs) != len(piece.prompt_targets or ()):
        return f"{len(result.prompt_logprobs)} prompt scores for {len(piece.prompt_targets or ())} targets"
    expected = 0 if piece.sample is None else 1 + piece.num_drafts
    if 1 <= len(result.sampled) < expected and _may_end_early(piece, result):
        expected = len(result.sampled)
    if len(result.sampled) != expected:
        if piece.sample is not None and piece.sample.num_candidates:
            return _problem_with_candidates(result.candidates, vocab_size)
        return f"{len(result.sampled)} tokens were sampled, {expected} expected"
    for sampled in result.sampled:
        if not 0 <= sampled.token_id < vocab_size:
            return f"token {sampled.token_id} is not in the vocabulary of {vocab_size}"
    return None


def _may_end_early(piece: SequenceSlice, result: SliceResult) -> bool:
    """Whether not every guess need have a token after it."""
    if piece.draft_parents is not None:
        return len(result.sampled) == len(result.rows)
    return piece.sample is not None and piece.sample.allowed is not None


def _problem_with_candidates(candidates: Sequence[Candidate], vocab_size: int) -> str | None:
    if not candidates:
        return "a search has nothing to go on with"
    for candidate in candidates:
        if not (0 <= candidate.token_id < vocab_size and isfinite(candidate.score)):
            return f"{candidate.token_id} with score {candidate.score} is no candidate"
    return None


def _run_alone(executor: Executor, plan: StepPlan) -> Outcome:
    try:
        return slices_of(executor.execute(plan), plan)[0]
    except GroupFailed:
        raise
    except Exception as error:
        return error


def num_right_drafts(piece: SequenceSlice, result: SliceResult) -> int:
    """How many drafts in a row came true, of a good result."""
    if not piece.num_drafts:
        return 0
    if piece.draft_parents is not None:
        return len(result.sampled) - 1
    num_checked = len(result.sampled) - 1
    pairs = zip(piece.drafts[:num_checked], result.sampled, strict=False)
    return next((i for i, (draft, found) in enumerate(pairs) if found.token_id != draft), num_checked)
