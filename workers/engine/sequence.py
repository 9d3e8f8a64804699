"""One choice of a request: its tokens, how far they are computed, and the blocks that hold them.

    tokens     prompt and output so far; the last one of a decoding sequence is not yet computed
    computed   the first `num_computed` of them have their keys and values in the pool
    started    so do, or will by steps that have begun, the first `num_started`: one more than there are
               tokens when the newest one is being sampled
    sealed     the first `num_sealed` blocks are full, computed, and were offered to the prefix cache
    released   the first `num_released` blocks will not be read again and were given back

    0 <= num_sealed * block_size <= num_computed <= num_tokens,   block_table covers at least num_computed
    tokens

Preemption drops the blocks and sets num_computed to 0; tokens, hashes and prompt scores stay, and computing
the tokens again brings the sequence to where it was. A choice that another group has begun is taken up in the
same way: its tokens are there, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from workers.engine.request import RequestState, needs_host
from workers.engine.step import SampleTask, SequenceSlice
from workers.hashing import BlockHash, chain_hash, root_hash
from workers.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from workers.decoding.chances import Chance
    from workers.decoding.copies import Copies
    from workers.decoding.drafter import Drafter
    from workers.engine.masks import GrammarCursor
    from workers.engine.model_guesses import DraftProgress
    from workers.engine.search import Search


class SequenceState(Enum):
    """Where the scheduler has it."""

    WAITING = "waiting"  # no blocks: not admitted yet, or preempted
    PREFILLING = "prefilling"  # has blocks; more than one token, or the first, to compute
    DECODING = "decoding"  # has blocks; its newest token to compute
    SEARCHING = "searching"  # the same for each hypothesis of a beam search
    FINISHED = "finished"


class SampledAt(NamedTuple):
    """The row of a step that the newest token of a sequence came from."""

    step: int
    slice: int
    row: int  # of those after which the slice sampled


class Sequence:
    """State of one choice. The scheduler changes state, blocks and progress; the engine appends tokens."""

    __slots__ = (
        "backlog",
        "block_table",
        "chance",
        "choice",
        "copies",
        "draft_parents",
        "draft_progress",
        "drafter",
        "drafts",
        "grammar",
        "has_answered",
        "hashes",
        "is_outgrown",
        "key",
        "max_num_tokens",
        "needs_host",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_released",
        "num_rows",
        "num_sealed",
        "output",
        "parent",
        "prompt",
        "prompt_len",
        "prompt_scores",
        "sampled_at",
        "search",
        "state",
        "task",
        "waits_for",
    )

    def __init__(self, parent: RequestState, choice: int, begun: Tokens[int] = ()) -> None:
        """`begun`: tokens that another group has made for it."""
        request = parent.request
        self.parent = parent
        self.choice = choice
        self.key = (request.priority, parent.arrival, choice)  # order of service, lowest first
        self.prompt = request.prompt_token_ids
        self.prompt_len = len(request.prompt_token_ids)
        self.max_num_tokens = parent.max_num_tokens
        self.output: list[int] = list(begun)
        self.state = SequenceState.WAITING
        self.num_computed = 0
        self.num_in_flight = 0  # tokens in steps that have begun, and whose results have not been taken
        self.needs_host = needs_host(request, parent.end_ids)
        self.num_sealed = 0
        self.num_released = 0  # blocks at the begin of the table that are no longer its own
        self.block_table: list[int] = []
        # Of full blocks; those of the output come as they are sealed.
        self.hashes = list(parent.prompt_hashes)
        self.waits_for: BlockHash | None = None  # a block that another sequence is computing
        self.num_cached: int | None = None  # prompt tokens found cached at the first admission
        self.drafts: tuple[int, ...] = ()  # guesses after the tokens, in the step being computed
        self.draft_parents: tuple[int, ...] | None = None  # of a tree of guesses, see SequenceSlice
        self.chance: Chance | None = None  # of its guesses, once one has been looked for
        self.drafter: Drafter | None = None  # of a method that guesses from the tokens alone, likewise
        self.copies: Copies | None = None  # beside the guesses of heads, likewise
        self.draft_progress: DraftProgress | None = None  # once a draft model has read of its blocks
        self.sampled_at: SampledAt | None = None  # while guesses come from there
        self.search: Search | None = None  # of a beam search: its hypotheses (`workers.engine.search`)
        self.num_rows = 1  # tokens of a step that it takes at most when its prompt is computed
        self.grammar: GrammarCursor | None = None  # once it is compiled
        self.has_answered = False  # its first chunk is out
        self.is_outgrown = False  # its keys were computed again for a greater length, or are to be
        self.backlog = 0  # tokens that the scheduler counts as still to prefill
        # Scores of prompt tokens 1, 2, ... as they come; None: not wanted, or delivered.
        wants_scores = choice == 0 and request.sampling.num_prompt_logprobs is not None
        self.prompt_scores: list[TokenLogprob] | None = [] if wants_scores else None
        self.task: SampleTask | None = None
        if request.sampling.max_tokens > 0:
            self.task = SampleTask(
                params=request.sampling,
                choice=choice,
                prompt_token_ids=self.prompt,
                output_token_ids=self.output,  # the live list: a task serves many steps
                end_token_ids=sorted(parent.end_ids) if request.sampling.min_tokens else (),
                takes_id_only=not self.needs_host,
            )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_len + len(self.output)

    @property
    def num_started(self) -> int:
        """Tokens that are computed, or in a step that has begun."""
        return self.num_computed + self.num_in_flight

    @property
    def held_blocks(self) -> list[int]:
        """Those of the table that it owns."""
        return self.block_table[self.num_released :]

    @property
    def num_readable(self) -> int:
        """Tokens that may be taken from the prefix cache.

        The last one has to be computed, to have a row to sample from. While prompt tokens are to be scored,
        so has each row whose score is missing: row i gives the score of token i + 1.
        """
        if self._is_scoring():
            assert self.prompt_scores is not None
            return len(self.prompt_scores)
        return self.num_tokens - 1

    def chunk_end(self, max_tokens: int) -> int:
        """Position after the last token of the next slice, when it may have `max_tokens`."""
        end = min(self.num_tokens, self.num_started + max_tokens)
        if self._is_scoring():
            assert self.prompt_scores is not None
            if self.num_computed < len(self.prompt_scores):  # scored before a preemption: no second time
                end = min(end, len(self.prompt_scores))
        return end

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens start .. end - 1."""
        if end <= self.prompt_len:
            return self.prompt[start:end]
        return self.prompt[start:] + tuple(
            self.output[max(0, start - self.prompt_len) : end - self.prompt_len]
        )

    def allowed(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The first ones of guesses, as far as the grammar of the answer goes on with them."""
        if self.grammar is not None and drafts:
            return drafts[: self.grammar.num_allowed(drafts)]
        return drafts

    def score_targets(self, start: int, end: int) -> tuple[int, ...] | None:
        """Prompt tokens to score in the rows start .. end - 1: one each, none for the last prompt token's."""
        if not self._is_scoring():
            return None
        assert self.prompt_scores is not None
        if start < len(self.prompt_scores):
            return None
        assert start == len(self.prompt_scores), (
            f"scores end at {len(self.prompt_scores)}, slice starts at {start}"
        )
        return self.prompt[start + 1 : end + 1]

    def decode_slice(self) -> SequenceSlice:
        """The newest token and the guesses after it."""
        newest = self.output[-1]
        return SequenceSlice(
            token_ids=(newest, *self.drafts) if self.drafts else (newest,),
            start=self.num_computed,
            block_table=self.block_table,
            sample=self.task,
            num_drafts=len(self.drafts),
            draft_parents=self.draft_parents,
        )

    def slice_ahead(self, row: int) -> SequenceSlice:
        """The token that is being sampled: the step in flight draws it from its logits of this row."""
        assert self.task is not None and not self.drafts, f"{self.key} cannot be planned ahead"
        return SequenceSlice(
            token_ids=(-1 - row,),
            start=self.num_started,
            block_table=self.block_table,
            sample=replace(self.task, num_sampled=len(self.output) + 1),
        )

    def chunk_slice(self, end: int, *, turns_by_length: bool = False) -> SequenceSlice:
        """The tokens from the first that is in no step yet up to `end`."""
        start, num_known = self.num_started, self.num_tokens
        if self.search is not None and self.task is None:
            num_known += 1  # the newest of the hypothesis
        return SequenceSlice(
            token_ids=self.tokens(start, end),
            start=start,
            block_table=self.block_table,
            sample=self.task if end == self.num_tokens else None,
            num_known=num_known if turns_by_length and num_known > end else 0,
            prompt_targets=self.score_targets(start, end),
            num_prompt_logprobs=self.parent.request.sampling.num_prompt_logprobs or 0,
        )

    def hash_of_block(self, index: int, block_size: int) -> BlockHash:
        """Hash of a full block, whose predecessors have been asked for before."""
        if index == len(self.hashes):
            parent = self.hashes[index - 1] if index else root_hash(self.parent.request.cache_salt)
            self.hashes.append(chain_hash(parent, self.tokens(index * block_size, (index + 1) * block_size)))
        return self.hashes[index]

    def hash_begun(self, block_size: int) -> None:
        """Names the full blocks of what another group has begun, to be found in the prefix cache."""
        for index in range(len(self.hashes), self.num_tokens // block_size):
            self.hash_of_block(index, block_size)

    def append(self, token_id: int) -> None:
        """The token that was sampled after the last computed one."""
        num_tokens = self.num_tokens
        assert self.num_computed == num_tokens, f"{num_tokens - self.num_computed} tokens not computed"
        assert num_tokens < self.max_num_tokens, f"a token after the last one, {self.max_num_tokens}"
        self.output.append(token_id)
        if self.grammar is not None and token_id not in self.parent.end_ids:
            self.grammar.accept(token_id)

    def end_reason(self) -> tuple[FinishReason | None, int | None]:
        """Whether the token just appended ends the sequence, and the id when it is an end id."""
        token_id = self.output[-1]
        if token_id in self.parent.end_ids:  # before min_tokens the sampler had it forbidden
            return FinishReason.STOP, token_id
        if self.grammar is not None and self.grammar.is_complete:
            return FinishReason.STOP, None
        if self.num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def take_prompt_scores(self) -> tuple[TokenLogprob | None, ...] | None:
        """The scores gathered over all prompt chunks, once; entry 0 has nothing before it."""
        scores, self.prompt_scores = self.prompt_scores, None
        return None if scores is None else (None, *scores)

    def check_progress(self, block_size: int, *, prefix_reuse: bool) -> None:
        """Asserts that a running sequence has blocks and seals for what is computed. Valid between steps."""
        computed, started, num_blocks = self.num_computed, self.num_started, len(self.block_table)
        assert num_blocks == -(-started // block_size), (
            f"{self.key}: {num_blocks} blocks for {started} tokens"
        )
        sealed = computed // block_size if prefix_reuse else 0
        assert self.num_sealed == sealed, f"{self.key}: {self.num_sealed} blocks sealed"
        # A hypothesis that is computed again may have no whole block in common with another.
        least = 1 if self.search is None else 0
        assert least <= started and computed < self.num_tokens, (
            f"{self.key}: {computed} of {self.num_tokens} computed"
        )

    def restart(self) -> None:
        """Forgets progress but not the tokens. The blocks have been freed."""
        self.block_table = []
        self.num_computed = 0
        self.num_sealed = 0
        self.num_released = 0
        self.waits_for = None
        self.draft_progress = None

    def _is_scoring(self) -> bool:
        return self.prompt_scores is not None and len(self.prompt_scores) < self.prompt_len - 1
