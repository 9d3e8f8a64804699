"""A step is planned and started while the one before it is computed, so that the device need not wait.

    plan n, start n -> plan n + 1, start n + 1 -> results of n -> plan n + 2, start n + 2 -> results of n + 1

At most two are in flight. What is known of a sequence is what results have said; a step in flight adds
`num_in_flight` to where it will be. The token that step n samples for it has a placeholder in step n + 1,
which is filled in where the id is drawn.

The rule. A step is planned ahead when the one before it was started, and no request of the group, waiting or
running, needs the host between two steps (`workers.engine.request.needs_host`), and somebody goes on, and
each that does has a block to go on in: nobody is preempted for a step ahead. Nor does a step ahead zero
blocks: they have no owner, and who is given one while the step is in flight, as a pull from another group
is, would have it zeroed afterwards. Else results come first. Engines that guess tokens, and models whose
keys are computed again at some length, never plan ahead.

An end that nobody could foresee (an end id, a cancelled request) comes when the next step computes a row of
that sequence: what comes of the row is thrown away. A block that a step in flight writes is freed only when
the step's results have been taken. So nobody else writes or reads it meanwhile, also not other groups, which
do not wait for the device as a later step does. That a sequence reaches max_tokens is foreseen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.engine.block_pool import BlockPool
from workers.engine.plan import ScheduledStep
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.step import GroupFailed, SequenceSlice, StartedStep, StepResult


@dataclass(slots=True)
class Flight:
    """A step that has begun."""

    scheduled: ScheduledStep
    began_s: float  # its planning
    started: StartedStep | Exception  # that it, or its start, raised
    is_ahead: bool  # it has tokens that are known on the device only
    lacks_ids: bool = False  # the step before it came to nothing

    @property
    def is_void(self) -> bool:
        """Whether nothing will come of it."""
        return isinstance(self.started, Exception)

    def result(self) -> StepResult:
        """Waits for it. Raises what it raised."""
        if isinstance(self.started, Exception):
            raise self.started
        return self.started.result()

    def fail(self, error: Exception) -> None:
        """Waits for it and throws away what comes. Raises GroupFailed."""
        try:
            self.result()
        except GroupFailed:
            raise
        except Exception as own:
            error = own
        self.started, self.lacks_ids = error, True


class Flights:
    """Steps that have been started and whose results have not been taken, and the blocks they hold back."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._flights: deque[Flight] = deque()  # the oldest first
        self._ended: dict[Sequence, list[int]] = {}  # sequences that are over, and their blocks
        self._num_needing_host = 0  # unfinished sequences

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """From the oldest on."""
        return iter(self._flights)

    def can_grow(self, most: int) -> bool:
        """Whether one more may be started, when so many may be there: behind a void one nothing comes."""
        flights = self._flights
        return not flights or (len(flights) < most and not any(flight.is_void for flight in flights))

    def note_unfinished(self, sequence: Sequence) -> None:
        """It waits or runs from now on."""
        self._num_needing_host += sequence.needs_host

    def note_finished(self, sequence: Sequence) -> None:
        """It is over, but for what steps in flight compute of it."""
        self._num_needing_host -= sequence.needs_host

    def can_depart(self, step: ScheduledStep) -> bool:
        """Whether ids are all that is wanted of a step, and there are some."""
        return not self._num_needing_host and any(piece.sample is not None for piece in step.plan.slices)

    def depart(self, flight: Flight) -> None:
        """It has been started, behind the others."""
        self._flights.append(flight)
        for sequence, piece in zip(flight.scheduled.sequences, flight.scheduled.plan.slices, strict=True):
            sequence.num_in_flight += len(piece.token_ids)

    def land(self) -> Flight:
        """The oldest, whose results have come, or never will: to be called before they are looked at."""
        flight = self._flights.popleft()
        for sequence, piece in zip(flight.scheduled.sequences, flight.scheduled.plan.slices, strict=True):
            sequence.num_in_flight -= len(piece.token_ids)
            if not sequence.num_in_flight and sequence in self._ended:
                self._pool.free_table(self._ended.pop(sequence))
        return flight

    def free(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that stops running, at once where no step in flight writes them."""
        blocks, sequence.block_table = sequence.held_blocks, []
        sequence.num_released = 0
        if sequence.num_in_flight:
            self._ended[sequence] = blocks
        else:
            self._pool.free_table(blocks)

    def reserve_next(self, block_size: int) -> tuple[list[Sequence], list[SequenceSlice]]:
        """Who goes on in the step after the newest, and the slice of each, with the blocks for it; nobody
        when results have to come first."""
        going_on = list(self._going_on())
        full = [each for each, _ in going_on if each.num_started == len(each.block_table) * block_size]
        if self._num_needing_host or self._pool.may_zero or len(full) > self._pool.num_available:
            return [], []
        for sequence in full:
            sequence.block_table.append(self._pool.allocate())
        slices = [sequence.slice_ahead(row) for sequence, row in going_on]
        return [sequence for sequence, _ in going_on], slices

    def tables(self) -> list[list[int]]:
        """Blocks that are held back, by sequence, for integrity checks."""
        return list(self._ended.values())

    def check_integrity(self, queues: Iterable[Iterable[Sequence]]) -> None:
        """Asserts the count; queues: all unfinished sequences."""
        needing = sum(sequence.needs_host for queue in queues for sequence in queue)
        assert self._num_needing_host == needing, f"{self._num_needing_host} need the host, {needing} found"

    def _going_on(self) -> Iterator[tuple[Sequence, int]]:
        """Those whose next token, not their last, the newest step samples, with its row of logits there."""
        step, row = self._flights[-1].scheduled, -1
        for sequence, piece in zip(step.sequences, step.plan.slices, strict=True):
            if piece.sample is None:
                continue
            row += 1
            is_last = sequence.num_tokens + 1 >= sequence.max_num_tokens
            if sequence.state is not SequenceState.FINISHED and not is_last:
                yield sequence, row
