"""The contract between policy and execution: what a step computes, and what comes back.

The scheduler writes a `StepPlan`; an `Executor` runs it on all ranks and returns a `StepResult`. A plan is
complete in itself: no rank keeps state about sequences between steps, only the KV pool itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from workers.decoding.beam_search import Candidate
from workers.engine.proposals import DraftHeads, DraftModel
from workers.types import INVALID_GRAMMAR, SamplingParams, TokenLogprob


class GrammarFailed(Exception):
    """An answer's grammar cannot go on: it would take too much, or no token fits. Ends the request; `code` is
    for the client."""

    def __init__(self, message: str, *, code: str = INVALID_GRAMMAR) -> None:
        super().__init__(message)
        self.code = code


class AllowedTokens(Protocol):
    """The tokens that the grammar of an answer goes on with."""

    def bits(self, num_drafts: int) -> bytes | None:
        """A bit for each token id, lowest first, 1: allowed, at least the whole vocabulary; None: all are.
        For the token after so many of the step's drafts. May wait for what is being computed beside the
        step. Raises GrammarFailed; after drafts it means that nothing is known of what follows them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTask:
    """Choose the token after a slice, or find the best ones for it. Read by the sampler on rank 0 before the
    step returns, never kept.

    The position being sampled is the number of tokens here: of prompt, output and drafts together.
    """

    params: SamplingParams
    choice: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # so far
    end_token_ids: Sequence[int] = ()  # never chosen before min_tokens has been reached
    drafts: Sequence[int] = ()  # guessed to come after the output
    num_candidates: int = 0  # of a search: so many tokens, the best ones; none is drawn
    # Tokens before the one to choose, after the prompt, when the last one is not known yet; None: all are.
    num_sampled: int | None = None
    allowed: AllowedTokens | None = None  # by a grammar, which then also says when an end id may come
    # All that it takes is an id drawn from a row of logits: no other numbers, and no tokens before it.
    takes_id_only: bool = False

    @property
    def num_new(self) -> int:
        """Tokens after the prompt, before the one to choose."""
        if self.num_sampled is not None:
            return self.num_sampled
        return len(self.output_token_ids) + len(self.drafts)

    @property
    def forbidden_token_ids(self) -> Sequence[int]:
        """Ids that must not be chosen now, whatever else is allowed."""
        if self.allowed is not None:
            return ()
        return self.end_token_ids if self.num_new < self.params.min_tokens else ()


# What is made for every row of every step is not frozen: to make it would take three times as long. Nobody
# changes it.


@dataclass(slots=True, kw_only=True)
class SequenceSlice:
    """The tokens of one sequence that a step computes."""

    # Never empty. In a step that is planned while the one before it is computed, -1 - i stands for the id
    # that is drawn there from row i of the logits.
    token_ids: Sequence[int]
    start: int  # position of the first one = tokens of the sequence already in the pool
    block_table: Sequence[int]  # pool blocks of positions 0 .. start + len(token_ids) - 1, in order
    sample: SampleTask | None = None  # set when the slice reaches the end of the sequence's tokens
    # Tokens that the sequence has, the last of them not in the slice; 0: none are left, or it does not matter
    # to the model.
    num_known: int = 0
    # The last ones of token_ids are guesses of what will be sampled: a token is sampled before each of them
    # and after the last. The keys and values of wrong ones are written and never read.
    num_drafts: int = 0
    # A tree of guesses: which of them each one follows, always one before it; -1: the token before all. None:
    # each follows the one before it.
    draft_parents: Sequence[int] | None = None
    # Score prompt tokens: for row i of the slice, log-probabilities of `prompt_targets[i]` (the token at
    # position start + i + 1) with the `num_prompt_logprobs` best; None: not asked for.
    prompt_targets: Sequence[int] | None = None
    num_prompt_logprobs: int = 0

    @property
    def drafts(self) -> Sequence[int]:
        """The guesses among the tokens."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def sample_tasks(self) -> Sequence[SampleTask]:
        """What to sample after each of the last rows, in order."""
        if self.sample is None:
            return ()
        if not self.num_drafts:
            return (self.sample,)
        paths: list[tuple[int, ...]] = [()]
        for index, draft in enumerate(self.drafts):
            before = index if self.draft_parents is None else self.draft_parents[index] + 1
            paths.append((*paths[before], draft))
        return tuple(replace(self.sample, drafts=path) for path in paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Work of one step: decode rows and prompt chunks of different sequences, in one batch."""

    number: int
    slices: Sequence[SequenceSlice]
    num_searches: int = 0  # the last so many slices are those of beam searches: they look for candidates
    # Blocks to fill with zeros on every rank before anything is written: a sequence with non-finite values
    # held them, and kernels may multiply what lies past a context by a weight of zero.
    zero_blocks: Sequence[int] = ()
    # (source, target): blocks to copy on every rank, after that and before anything is written. Each target
    # belongs to one hypothesis of a beam search, which goes on from what it had in common with another.
    copy_blocks: Sequence[tuple[int, int]] = ()

    def alone(self, index: int, *, prepares_blocks: bool) -> StepPlan:
        """The same for one slice; prepares_blocks: zeros and copies them too."""
        return StepPlan(
            number=self.number,
            slices=(self.slices[index],),
            num_searches=int(index >= len(self.slices) - self.num_searches),
            zero_blocks=self.zero_blocks if prepares_blocks else (),
            copy_blocks=self.copy_blocks if prepares_blocks else (),
        )


@dataclass(slots=True, kw_only=True)
class Sampled:
    """The token chosen for a slice."""

    token_id: int
    logprob: TokenLogprob | None = None  # when num_logprobs is set


@dataclass(slots=True, kw_only=True)
class SliceResult:
    """What a step found for one slice, in the order of the plan."""

    # When the slice samples: one, and one more for each draft, as far as its grammar says what may follow
    # that; of a tree those on the way that came true.
    sampled: Sequence[Sampled] = ()
    rows: Sequence[int] = ()  # of a tree: after which draft each of those was sampled, from 1; 0: before all
    candidates: Sequence[Candidate] = ()  # when a search's slice samples: those asked for, best first
    prompt_logprobs: Sequence[TokenLogprob] = ()  # one per entry of prompt_targets
    error: str | None = None  # the sequence cannot go on: non-finite logits, or what error_code says
    error_code: str = "numerical_error"

    def row_of(self, number: int) -> int:
        """Of the sampled token of this number: the draft after which it was sampled, as in `rows`."""
        return self.rows[number] if self.rows else number


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of a step, one per slice."""

    slices: Sequence[SliceResult]


class GroupFailed(Exception):
    """A rank died, hung or disagreed: the group cannot compute any more. Its message names the rank."""


class GroupDistrusted(GroupFailed):
    """The group computes wrongly, by no fault of its requests."""


class StartedStep(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Waits for it. To be called once. Raises as `Executor.execute`."""
        ...


class StepStarter(Protocol):
    """Runs plans without waiting for them: several are computed one after the other, in the order of their
    starts. See `workers.engine.ahead`."""

    def start(self, plan: StepPlan) -> StartedStep:
        """Begins a step. The ids that are drawn from its rows have to be all that is wanted of it, and there
        has to be one at least. Everything of the plan is read before this returns. Raises as
        `Executor.execute`."""
        ...


class Executor(Protocol):
    """Runs plans on all ranks of a group."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool of every rank, measured at start."""
        ...

    @property
    def draft_model(self) -> DraftModel | None:
        """The model that guesses tokens beside the served one; None where there is none."""
        ...

    @property
    def draft_heads(self) -> DraftHeads | None:
        """The heads that guess tokens; None where there are none."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. Raises GroupFailed when a rank is dead, silent or out of step."""
        ...

    def close(self) -> None:
        """Ends the other ranks and frees what the executor holds. May be called twice."""
        ...
