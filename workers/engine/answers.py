"""What a sequence has to say after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import chain

from workers.engine.execution import Failure, Outcome, failure_of
from workers.engine.scheduler import Scheduler
from workers.engine.search import first_chunk, last_chunks, search_of
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.step import Sampled, SequenceSlice, SliceResult
from workers.types import FinishReason, TokenChunk, TokenLogprob


def choices_of(sequence: Sequence) -> tuple[int, ...]:
    """That a sequence answers for: a beam search for all of its request."""
    if sequence.search is None:
        return (sequence.choice,)
    return tuple(range(sequence.parent.request.num_choices))


def open_choices(sequences: Iterable[Sequence]) -> tuple[int, ...]:
    """That have not had their last chunk."""
    left = (sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED)
    return tuple(chain.from_iterable(map(choices_of, left)))


def token_chunk(
    sequence: Sequence,
    sampled: Items[Sampled],
    reason: FinishReason | None,
    stop_token_id: int | None,
    clock: Callable[[], float],
) -> TokenChunk:
    """The chunk of tokens just appended; the first one of a sequence has what is said once."""
    is_first = not sequence.has_answered
    sequence.has_answered = True
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for found in sampled:
        token_ids.append(found.token_id)
        if found.logprob is not None:
            logprobs.append(found.logprob)
    return TokenChunk(
        request_id=sequence.parent.request.request_id,
        choice=sequence.choice,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) or None,
        prompt_logprobs=sequence.take_prompt_scores() if is_first else None,
        num_cached_tokens=(sequence.num_cached or 0) if is_first else 0,
        times=sequence.parent.times(clock()) if is_first else None,
        finish_reason=reason,
        stop_token_id=stop_token_id,
    )


def take_search(
    sequence: Sequence,
    rows: Items[tuple[SequenceSlice, Outcome]],
    scheduler: Scheduler,
    vocab_size: int,
    now_s: float,
) -> Failure | list[TokenChunk]:
    """Brings a beam search forward by what the step found for its hypotheses, or for a chunk. What it has to
    say: once that it has begun, and when it is over its last chunks; else []."""
    results = []
    for piece, outcome in rows:
        failure = failure_of(piece, outcome, vocab_size)
        if failure is not None:
            return failure
        assert isinstance(outcome, SliceResult)
        results.append(outcome)
    search = search_of(sequence)
    if sequence.state is SequenceState.PREFILLING:
        piece = rows[0][0]
        scheduler.advance(sequence, len(piece.token_ids))
        if piece.prompt_targets is not None:
            assert sequence.prompt_scores is not None
            sequence.prompt_scores.extend(results[0].prompt_logprobs)
        if sequence.num_computed < sequence.num_tokens:
            return []
        if piece.sample is None:
            scheduler.resume_search(sequence)
            return []
        search.times = sequence.parent.times(now_s)
    parents = search.beam.advance([result.candidates for result in results])
    if not search.beam.is_over:
        scheduler.go_on_searching(sequence, parents)
        return [] if sequence.has_answered else [first_chunk(sequence, search)]
    found = last_chunks(sequence, search)
    was_cut = found[0].finish_reason is FinishReason.LENGTH
    scheduler.estimate.observe(len(found[0].token_ids), was_cut=was_cut)
    return found
