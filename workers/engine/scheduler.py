"""Decides what each step computes.

    add --> waiting --admit--> prefilling --first token--> decoding --> finished
              ^                    |                          |
              +-----preempt--------+--------------------------+

A step has one budget of tokens. Decode rows come first, one for every decoding sequence; then the next
chunks of the sequences in prefill; then waiting ones are admitted, lowest (priority, arrival, choice) first.
Only tokens that are really computed count: a cached prefix is free.

Progress. The first in the order of service among the running is never preempted, and its whole need fits the
pool (add() has checked), so it always gets its blocks: every step computes something until all is done. With
nothing running the first waiting one is admitted without further question. Blocks that the exchange with
other groups holds are the exception (`workers.engine.exchange`): what can be taken back is, before anybody is
preempted; for what cannot, one that runs alone goes back to the waiting, and a step may find nothing to do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from workers.config import ScheduleConfig
from workers.engine.ahead import Flights
from workers.engine.block_pool import BlockPool
from workers.engine.computed import ComputedBlocks
from workers.engine.demand import OutputLengthEstimate
from workers.engine.drafting import Drafting
from workers.engine.exchange import KVExchange
from workers.engine.fetch import FetchState
from workers.engine.plan import ScheduledStep, plan_step
from workers.engine.preemption import choose_victim
from workers.engine.prefixes import PrefixesInProgress
from workers.engine.queues import Queues, check_limits
from workers.engine.request import EngineLimits
from workers.engine.search import reserve_all, search_of
from workers.engine.sequence import Sequence, SequenceState

_by_key = attrgetter("key")
_WAITING, _PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
_DECODING, _FINISHED = SequenceState.DECODING, SequenceState.FINISHED
_SEARCHING = SequenceState.SEARCHING


class Scheduler:
    """Owns the order of sequences and what blocks they hold. Used by one thread."""

    def __init__(
        self,
        *,
        schedule: ScheduleConfig,
        pool: BlockPool,
        block_size: int,
        prefix_reuse: bool,
        in_progress: PrefixesInProgress,
        exchange: KVExchange,
        drafting: Drafting | None = None,
        limits: EngineLimits,
    ) -> None:
        check_limits(schedule, block_size)
        self._pool = pool
        self._block_size = block_size
        self._prefix_reuse = prefix_reuse
        self._max_step_tokens = schedule.max_step_tokens
        self._max_chunk = schedule.max_prefill_chunk or schedule.max_step_tokens
        # Each decoding sequence takes a token of the budget, so that many can run and still all get on.
        self._max_running = min(schedule.max_running, schedule.max_step_tokens)
        self._waiting: list[Sequence] = []  # sorted by key
        self._prefilling: list[Sequence] = []  # sorted by key
        self._decoding: list[Sequence] = []  # in the order of their first token
        self._searching: list[Sequence] = []  # in the order of their first tokens
        self._extra_rows = 0  # of running sequences, beyond one each
        self._in_progress = in_progress
        keeps_all = drafting is not None and drafting.reads_blocks
        self._computed = ComputedBlocks(pool, block_size, prefix_reuse, limits, in_progress, keeps_all)
        self._turns_by_length = limits.turns_by_length
        self._exchange = exchange
        self._drafting = drafting
        self.flights = Flights(pool)
        self.num_steps = 0
        self.estimate = OutputLengthEstimate(
            block_size=block_size, first_guess=schedule.expected_output_tokens
        )
        self.num_queued_requests = 0  # never admitted
        self.waiting_tokens = 0  # sum of all backlogs
        self.running_tokens = 0  # computed tokens of running sequences
        self.prompt_tokens_total = 0  # of requests, at their first admission
        self.cached_tokens_total = 0
        self.remote_tokens_total = 0
        self.preemptions_total = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Rows of a step that those who run may take: a beam search counts for its width."""
        return len(self._prefilling) + len(self._decoding) + len(self._searching) + self._extra_rows

    def add(self, sequences: list[Sequence]) -> None:
        """Queues all choices of a request, whose total need has been found to fit the pool."""
        self.num_queued_requests += 1
        for sequence in sequences:
            self.flights.note_unfinished(sequence)
            self._enqueue(sequence)

    def schedule(self) -> ScheduledStep | None:
        """The next step; None when no sequence is unfinished, or all wait for their grammars or for blocks
        that other groups are to bring or to give back, or when the results of a step in flight come first.
        The plan shares block tables with the scheduler: it is to be read before anything else is called."""
        ahead, slices = self.flights.reserve_next(self._block_size) if self.flights else ([], [])
        if self.flights and not ahead:
            return None
        preemptions = self.preemptions_total
        if not ahead:
            self._reserve_decode_blocks()
        budget = self._max_step_tokens - (len(ahead) or len(self._decoding))
        if self._searching:
            reserve_all(self._searching, self._pool, self._block_size, self._make_room)
            budget -= sum(len(search_of(sequence).tables) for sequence in self._searching)
        chunks = self._reserve_chunks(budget) if self._prefilling else []
        if self._waiting and preemptions == self.preemptions_total:  # else memory is short: nobody new
            self._start_fetches()
            self._admit(budget - sum(end - sequence.num_started for sequence, end in chunks), chunks)
        if self._drafting is not None and not chunks:
            self._drafting.start(self._decoding, budget, self.estimate)
        slices = slices or [sequence.decode_slice() for sequence in self._decoding]
        step = plan_step(
            *(self.num_steps + 1, ahead or self._decoding, slices, chunks, self._searching, self._pool),
            turns_by_length=self._turns_by_length,
        )
        if step is None:
            is_done = not self.num_running and all(s.parent.awaits_grammar for s in self._waiting)
            assert is_done or self._exchange.is_holding, "sequences left and none of them can go on"
            return None
        self.num_steps += 1
        return step

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The step has computed this many more tokens of a running sequence."""
        sequence.num_computed += num_tokens
        self.running_tokens += num_tokens
        self._computed.note(sequence)
        if sequence.state is _PREFILLING:
            self._set_backlog(sequence, sequence.num_tokens - sequence.num_computed)

    def start_decoding(self, sequence: Sequence) -> None:
        """Its tokens were all computed and the next one has been appended."""
        assert sequence.state is _PREFILLING, f"{sequence.key} is {sequence.state.value}, not in prefill"
        assert sequence.num_computed == sequence.num_tokens - 1, f"{sequence.key} has a longer way to go"
        self._end_prefill(sequence, _DECODING, self._decoding)

    def go_on_searching(self, sequence: Sequence, parents: tuple[int, ...]) -> None:
        """A step, of hypotheses or the prompt, has brought a search new hypotheses, with these parents."""
        search = search_of(sequence)
        if sequence.state is _SEARCHING:
            sequence.num_computed += 1
            self.running_tokens += 1
            search.branch(sequence, parents, self._pool)
        else:
            search.begin(sequence, parents, self._pool)
            self._end_prefill(sequence, _SEARCHING, self._searching)

    def resume_search(self, sequence: Sequence) -> None:
        """A search that was preempted has computed one of its hypotheses again: on to the next, or to go on
        with all of them."""
        before = sequence.num_computed
        if search_of(sequence).resume(sequence, self._pool, self._block_size):
            if self._prefix_reuse:
                sequence.hash_begun(self._block_size)
                sequence.num_sealed = sequence.num_computed // self._block_size
            self._set_backlog(sequence, sequence.num_tokens - sequence.num_computed)
        else:
            self._end_prefill(sequence, _SEARCHING, self._searching)
        self.running_tokens += sequence.num_computed - before

    def _end_prefill(self, sequence: Sequence, state: SequenceState, queue: list[Sequence]) -> None:
        self._prefilling.remove(sequence)
        self._set_backlog(sequence, 0)
        sequence.state = state
        queue.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes an unfinished sequence out, wherever it is; its blocks are free unless a step has it."""
        if sequence.state is _WAITING:
            del self._waiting[bisect_left(self._waiting, sequence.key, key=_by_key)]
        else:
            self._stop_running(sequence)
        self._set_backlog(sequence, 0)
        sequence.state = _FINISHED
        self.flights.note_finished(sequence)
        parent = sequence.parent
        parent.num_unfinished -= 1
        if parent.fetch is not None and parent.num_unfinished == 0:
            self._exchange.fetches.release(sequence)
        if parent.num_unfinished == 0 and not parent.is_admitted:
            self.num_queued_requests -= 1

    def remove_spoiled(self, sequence: Sequence) -> None:
        """Takes out a running sequence whose values are not numbers: none of its blocks stays findable,
        because nobody knows where it began, and once free they are zeroed before the next step."""
        self._computed.spoil(sequence)
        if sequence.search is not None:
            sequence.search.spoil(self._pool)
        self.remove(sequence)

    def check_integrity(self) -> int:
        """Asserts the invariants of queues, counters, blocks and announced prefixes. Valid between steps.
        Returns the number of sequences."""
        queues = Queues(self._waiting, self._prefilling, self._decoding, self._searching)
        queues.check_integrity(self._block_size, prefix_reuse=self._prefix_reuse)
        queues.check_counts(
            extra_rows=self._extra_rows,
            waiting_tokens=self.waiting_tokens,
            running_tokens=self.running_tokens,
            num_queued_requests=self.num_queued_requests,
        )
        assert self.num_running <= self._max_running, f"{self.num_running} rows run, {self._max_running} may"
        tables = self._exchange.tables() + queues.block_tables() + self.flights.tables()
        self._pool.check_integrity(tables)
        self._exchange.check_integrity()
        self._in_progress.check_integrity()
        self.flights.check_integrity(queues)
        return sum(map(len, queues))

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_by_key)
        shared = 0  # tokens that the first choice computes for the others
        if self._prefix_reuse and sequence.choice != sequence.parent.first_choice:
            shared = min(sequence.prompt_len, sequence.num_tokens - 1) // self._block_size * self._block_size
        self._set_backlog(sequence, sequence.num_tokens - shared)

    def _set_backlog(self, sequence: Sequence, num_tokens: int) -> None:
        self.waiting_tokens += num_tokens - sequence.backlog
        sequence.backlog = num_tokens

    def _reserve_decode_blocks(self) -> None:
        for sequence in self._computed.outgrown(self._decoding + self._searching):
            self.send_back(sequence)
        full = [s for s in self._decoding if s.num_computed == len(s.block_table) * self._block_size]
        if len(full) > self._pool.num_available:
            full.sort(key=_by_key)
        for sequence in full:
            if sequence.state is _DECODING and self._make_room(sequence):
                sequence.block_table.append(self._pool.allocate())

    def _reserve_chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        """Next chunk of each sequence in prefill, as the position where it ends."""
        chunks = []
        for sequence in self._prefilling.copy():
            if budget == 0:
                break
            if sequence.state is _PREFILLING:  # not preempted for one before it
                end = self._grow(sequence, sequence.chunk_end(min(budget, self._max_chunk)))
                if end > sequence.num_started:
                    budget -= end - sequence.num_started
                    chunks.append((sequence, end))
        return chunks

    def _grow(self, sequence: Sequence, end: int) -> int:
        """Allocates blocks for positions up to `end` or as far as the pool goes without preemption, but for
        at least one token. Returns the position reached: num_started only if the sequence was itself
        preempted, or nobody may be."""
        table, size = sequence.block_table, self._block_size
        if sequence.num_started == len(table) * size and not self._make_room(sequence):
            return sequence.num_started
        missing = -(-end // size) - len(table)
        for _ in range(min(missing, self._pool.num_available)):
            table.append(self._pool.allocate())
        return min(end, len(table) * size)

    def _make_room(self, sequence: Sequence) -> bool:
        """Sees to it that a block is available. False when `sequence` was itself preempted for it, or a step
        is in flight: then nobody is."""
        while self._pool.num_available == 0:
            if self.flights:
                return False
            if self._exchange.yield_blocks():
                continue
            running = self._prefilling + self._decoding + self._searching
            victim = sequence
            if len(running) > 1 or not self._exchange.is_holding:
                victim = choose_victim(sequence, running, self._pool, self._block_size)
            self.preemptions_total += 1
            self.send_back(victim)
            if victim is sequence:
                return False
        return True

    def send_back(self, sequence: Sequence) -> None:
        """From those who run to those who wait, to be computed again; not while a step in flight has it."""
        self._stop_running(sequence)
        sequence.restart()
        if sequence.search is not None:
            sequence.search.rewind(sequence)
            if self._prefix_reuse:
                sequence.hash_begun(self._block_size)
        sequence.state = _WAITING
        self._enqueue(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        queues = {_PREFILLING: self._prefilling, _DECODING: self._decoding, _SEARCHING: self._searching}
        queues[sequence.state].remove(sequence)
        if sequence.search is not None:
            sequence.search.release(self._pool)
        self._extra_rows -= sequence.num_rows - 1
        self._in_progress.withdraw(sequence)
        self.running_tokens -= sequence.num_computed
        self.flights.free(sequence)

    def _admit(self, budget: int, chunks: list[tuple[Sequence, int]]) -> None:
        """Admits waiting sequences in order while budget, places and future memory last; adds their chunks.

        One that waits for its grammar, or for blocks, another's or fetched, is passed over. One that does not
        fit, or whose fetch does not, stops the rest: small ones must not overtake it for ever.
        """
        index, demand = 0, None
        while budget > 0 and self.num_running < self._max_running and index < len(self._waiting):
            sequence = self._waiting[index]
            if sequence.parent.awaits_grammar:
                index += 1
                continue
            if self.num_running + sequence.num_rows > self._max_running:
                break
            if sequence.waits_for is not None and self._in_progress.is_computing(sequence.waits_for):
                index += 1
                continue
            fetch = sequence.parent.fetch
            if fetch is not None and fetch.state is not FetchState.OVER:
                if fetch.state is FetchState.WANTED and sequence is fetch.sequence:
                    if self.num_running or not self._exchange.gives_way():
                        break
                    self._start_fetches()
                    index, demand = 0, None  # whose fetch was given up need not wait any more
                    continue
                index += 1
                continue
            readable = sequence.num_readable // self._block_size if self._prefix_reuse else 0
            found = self._pool.find_chain(sequence.hashes[:readable])
            sequence.waits_for = self._in_progress.last_shared(sequence, len(found), readable)
            if sequence.waits_for is not None:
                index += 1
                continue
            if self.num_running or self._exchange.is_holding:
                if demand is None:
                    demand = self._demand_of_running() + self._exchange.fetches.demand
                fresh = self.estimate.expected_blocks(sequence) - len(found)
                revived = sum(self._pool.num_owners(block) == 0 for block in found)
                if demand + fresh + revived > self._pool.num_available:
                    if self.num_running or not self._exchange.gives_way():
                        break
                    index, demand = 0, None
                    continue
            del self._waiting[index]
            self._start_prefill(sequence, found)
            end = self._grow(sequence, sequence.chunk_end(min(budget, self._max_chunk)))
            assert end > sequence.num_computed, f"{sequence.key} was admitted and cannot begin"
            budget -= end - sequence.num_computed
            chunks.append((sequence, end))
            if demand is not None:
                demand += max(0, self.estimate.expected_blocks(sequence) - len(sequence.block_table))

    def _start_fetches(self) -> None:
        if self._exchange.fetches.num_wanted:
            self._exchange.fetches.start_wanted(
                self._waiting, self.estimate, self._demand_of_running(), is_idle=not self.num_running
            )

    def _demand_of_running(self) -> int:
        return self.estimate.demand([*self._prefilling, *self._decoding], self._searching)

    def _start_prefill(self, sequence: Sequence, found: list[int]) -> None:
        for block in found:
            self._pool.share(block)
        num_cached = len(found) * self._block_size
        sequence.block_table = found
        sequence.num_sealed = len(found)
        sequence.num_computed = num_cached
        sequence.state = _PREFILLING
        self._extra_rows += sequence.num_rows - 1
        self._exchange.note_admission()
        insort(self._prefilling, sequence, key=_by_key)
        self.running_tokens += num_cached
        self._set_backlog(sequence, sequence.num_tokens - num_cached)
        if self._prefix_reuse:
            self._in_progress.announce(sequence)
        self._computed.note(sequence)
        cached_prompt = min(num_cached, sequence.prompt_len)  # what another group has begun may be cached too
        if sequence.num_cached is None:
            sequence.num_cached = cached_prompt
        if not sequence.parent.is_admitted:
            sequence.parent.is_admitted = True
            self.num_queued_requests -= 1
            if sequence.parent.fetch is not None:
                self._exchange.fetches.release(sequence)
            self.prompt_tokens_total += sequence.prompt_len * sequence.parent.is_counted
            self.cached_tokens_total += cached_prompt
            fetched = sequence.parent.num_fetched_blocks * self._block_size
            self.remote_tokens_total += min(fetched, cached_prompt)
