"""A beam search in the engine: one sequence for the scheduler, whose hypotheses have a block table each.

    waiting --> prefilling --prompt computed--> searching: a step computes the newest token of each hypothesis
       ^                                            |
       +------------------- preempt ----------------+

    block_table of the sequence   while it is in prefill: of what it computes just now
    tables                        of hypotheses; all of them while it is searching

Hypotheses share blocks by reference count. A step writes into the last block only, so before a step each
hypothesis gets a last block of its own: a new one, or a copy of the one that it shares (copy-on-write). A
change of order is a change of tables.

All hypotheses go and come back together. Back in prefill, the sequence computes their tokens but for the
newest, one hypothesis after the other: what the next one has in common with one that is there, it shares.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import chain

from workers.decoding.beam_search import BeamSearch
from workers.engine.block_pool import BlockPool
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.step import SampleTask, SequenceSlice
from workers.types import BeamParams, FinishReason, StageTimes, TokenChunk


class Search:
    """Hypotheses and blocks of one sequence. The scheduler has it change them."""

    __slots__ = ("beam", "copies", "tables", "task", "times")

    def __init__(self, beam: BeamSearch, task: SampleTask) -> None:
        self.beam = beam
        self.task = task  # of the prompt's last row; those of hypotheses differ in their output only
        self.tables: list[list[int]] = []
        self.copies: list[tuple[int, int]] = []  # (source, target) that the next step has to make
        self.times: StageTimes | None = None  # until the first candidates

    @property
    def num_blocks(self) -> int:
        """In `tables`, each counted once."""
        return len(set(chain.from_iterable(self.tables)))

    def begin(self, sequence: Sequence, parents: Items[int], pool: BlockPool) -> None:
        """The prompt is computed and the first hypotheses are known."""
        self.tables, sequence.block_table = [sequence.block_table], []
        self.branch(sequence, parents, pool)

    def branch(self, sequence: Sequence, parents: Items[int], pool: BlockPool) -> None:
        """Each hypothesis goes on from the blocks of its parent; those without a child give theirs back."""
        before, self.tables = self.tables, []
        unclaimed = set(range(len(before)))
        for parent in parents:
            if parent in unclaimed:
                unclaimed.remove(parent)
                self.tables.append(before[parent])
            else:
                self.tables.append(before[parent].copy())
                for block in before[parent]:
                    pool.share(block)
        for parent in unclaimed:
            pool.free_table(before[parent])
        self.copies.clear()
        sequence.output = list(self.beam.hypotheses[0].token_ids)

    def reserve(
        self, sequence: Sequence, pool: BlockPool, block_size: int, make_room: Callable[[Sequence], bool]
    ) -> None:
        """Gives each hypothesis a last block to write into. make_room: sees to it that a block is there;
        False when the sequence itself was preempted for it."""
        is_full = sequence.num_computed % block_size == 0
        for table in self.tables:
            if not is_full and pool.num_owners(table[-1]) == 1:
                continue
            if not make_room(sequence):
                return
            block = pool.allocate()
            if is_full:
                table.append(block)
            else:
                self.copies.append((table[-1], block))
                pool.free(table[-1])
                table[-1] = block

    def slices(self, sequence: Sequence) -> list[SequenceSlice]:
        """The newest token of each hypothesis."""
        return [
            SequenceSlice(
                token_ids=hypothesis.token_ids[-1:],
                start=sequence.num_computed,
                block_table=table,
                sample=replace(self.task, output_token_ids=hypothesis.token_ids),
            )
            for hypothesis, table in zip(self.beam.hypotheses, self.tables, strict=True)
        ]

    def spoil(self, pool: BlockPool) -> None:
        """What the blocks hold is not to be trusted."""
        for block in set(chain.from_iterable(self.tables)):
            pool.spoil(block)

    def release(self, pool: BlockPool) -> None:
        """Gives all blocks back."""
        for table in self.tables:
            pool.free_table(table)
        self.tables = []
        self.copies.clear()

    def rewind(self, sequence: Sequence) -> None:
        """All blocks are gone. What the sequence computes next is the prompt, or the first hypothesis."""
        if self.beam.hypotheses[0].token_ids:
            self._turn_to(sequence, 0)

    def resume(self, sequence: Sequence, pool: BlockPool, block_size: int) -> bool:
        """The sequence has computed a hypothesis: on to the next. False when none is left: all are there."""
        self.tables.append(sequence.block_table)
        sequence.block_table = []
        while len(self.tables) < len(self.beam.hypotheses):
            self._turn_to(sequence, len(self.tables))
            table, num_shared = self._most_shared(sequence, block_size)
            for block in table:
                pool.share(block)
            if num_shared < sequence.num_tokens:
                sequence.block_table = table
                sequence.num_computed = num_shared
                return True
            self.tables.append(table)
        sequence.output = list(self.beam.hypotheses[0].token_ids)
        sequence.num_computed = sequence.num_tokens - 1
        return False

    def check_integrity(self, sequence: Sequence, block_size: int) -> None:
        """Asserts that a searching sequence has what its hypotheses need. Valid between steps."""
        hypotheses, computed = self.beam.hypotheses, sequence.num_computed
        assert len(self.tables) == len(hypotheses) > 0, f"{len(self.tables)} tables, {len(hypotheses)} run"
        assert not sequence.block_table and not self.copies, f"{sequence.key} has blocks beside its tables"
        for hypothesis, table in zip(hypotheses, self.tables, strict=True):
            assert sequence.prompt_len + len(hypothesis.token_ids) == computed + 1, (
                f"{sequence.key} is uneven"
            )
            assert len(table) == -(-computed // block_size), f"{len(table)} blocks for {computed} tokens"

    def _turn_to(self, sequence: Sequence, index: int) -> None:
        """The sequence's tokens are those of a hypothesis but for the newest; none is sampled after them."""
        sequence.output = list(self.beam.hypotheses[index].token_ids[:-1])
        sequence.hashes = list(sequence.parent.prompt_hashes)
        sequence.task = None

    def _most_shared(self, sequence: Sequence, block_size: int) -> tuple[list[int], int]:
        """Blocks of the hypothesis in `tables` that has most tokens in common with what the sequence has, and
        how many tokens are in them: whole blocks, unless it is all of them."""
        best, most = 0, -1
        for index in range(len(self.tables)):
            theirs = self.beam.hypotheses[index].token_ids
            common = next(
                (place for place, token in enumerate(sequence.output) if theirs[place] != token),
                len(sequence.output),
            )
            if common > most:
                best, most = index, common
        num_shared = sequence.prompt_len + most
        if num_shared < sequence.num_tokens:
            num_shared -= num_shared % block_size
        return self.tables[best][: -(-num_shared // block_size)], num_shared


def search_of(sequence: Sequence) -> Search:
    """Of a sequence that is known to be one."""
    assert sequence.search is not None, f"{sequence.key} is no beam search"
    return sequence.search


def reserve_all(
    searching: Items[Sequence], pool: BlockPool, block_size: int, make_room: Callable[[Sequence], bool]
) -> None:
    """`Search.reserve` for each, in the order of service; one may be preempted for another."""
    for sequence in sorted(searching, key=lambda each: each.key):
        if sequence.state is SequenceState.SEARCHING:
            search_of(sequence).reserve(sequence, pool, block_size, make_room)


def make_search(sequence: Sequence, params: BeamParams) -> None:
    """Makes a sequence that has computed nothing a search."""
    request = sequence.parent.request
    beam = BeamSearch(params, max_tokens=request.sampling.max_tokens, end_ids=sequence.parent.end_ids)
    assert sequence.task is not None, "a search for no tokens"
    sequence.task = replace(sequence.task, num_candidates=beam.num_candidates)
    sequence.num_rows = params.width
    sequence.search = Search(beam, sequence.task)


def first_chunk(sequence: Sequence, search: Search) -> TokenChunk:
    """Of choice 0, once the prompt is computed: no tokens, which come at the end. But whoever waits knows
    from then on that the search is under way, and not waiting for its turn."""
    sequence.has_answered = True
    return TokenChunk(
        request_id=sequence.parent.request.request_id,
        choice=0,
        prompt_logprobs=sequence.take_prompt_scores(),
        num_cached_tokens=sequence.num_cached or 0,
        times=search.times,
    )


def last_chunks(sequence: Sequence, search: Search) -> list[TokenChunk]:
    """What a search that is over has to say: one chunk of each choice, the best first."""
    request, end_ids = sequence.parent.request, sequence.parent.end_ids
    finished = search.beam.finished
    assert len(finished) >= request.num_choices, f"{len(finished)} found of {request.num_choices}"
    chunks = []
    for choice, hypothesis in enumerate(finished[: request.num_choices]):
        last = hypothesis.token_ids[-1]
        is_first = choice > 0 or not sequence.has_answered
        chunks.append(
            TokenChunk(
                request_id=request.request_id,
                choice=choice,
                token_ids=hypothesis.token_ids,
                logprobs=hypothesis.logprobs or None,
                prompt_logprobs=sequence.take_prompt_scores() if choice == 0 else None,
                num_cached_tokens=(sequence.num_cached or 0) if is_first else 0,
                times=search.times if is_first else None,
                finish_reason=FinishReason.STOP if last in end_ids else FinishReason.LENGTH,
                stop_token_id=last if last in end_ids else None,
                score=hypothesis.score,
            )
        )
    return chunks
