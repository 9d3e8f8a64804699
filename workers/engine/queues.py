"""What holds for the queues of a scheduler and for its limits."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from workers.config import ScheduleConfig
from workers.engine.search import search_of
from workers.engine.sequence import Sequence, SequenceState

_by_key = attrgetter("key")


class Queues(NamedTuple):
    """Its sequences, each in one of the four. Looks only."""

    waiting: list[Sequence]
    prefilling: list[Sequence]
    decoding: list[Sequence]
    searching: list[Sequence]

    def check_integrity(self, block_size: int, *, prefix_reuse: bool) -> None:
        """Asserts that all are where they belong and have what they need there. Valid between steps."""
        everyone = [*chain.from_iterable(self)]
        assert len({id(sequence) for sequence in everyone}) == len(everyone), "a sequence in two places"
        for queue, state in (
            (self.waiting, SequenceState.WAITING),
            (self.prefilling, SequenceState.PREFILLING),
            (self.decoding, SequenceState.DECODING),
            (self.searching, SequenceState.SEARCHING),
        ):
            assert all(sequence.state is state for sequence in queue), f"wrong state among the {state.value}"
        assert self.waiting == sorted(self.waiting, key=_by_key), "waiting sequences out of order"
        assert self.prefilling == sorted(self.prefilling, key=_by_key), "prefilling sequences out of order"
        for sequence in self.waiting:
            assert not sequence.block_table and not sequence.num_computed, f"{sequence.key} waits with blocks"
        for sequence in self.prefilling + self.decoding:
            sequence.check_progress(block_size, prefix_reuse=prefix_reuse)
        for sequence in self.searching:
            search_of(sequence).check_integrity(sequence, block_size)
        for sequence in self.decoding + self.searching:
            assert sequence.num_tokens - sequence.num_computed == 1, (
                f"{sequence.key} decodes with tokens to prefill"
            )

    def check_counts(
        self, *, extra_rows: int, waiting_tokens: int, running_tokens: int, num_queued_requests: int
    ) -> None:
        """Asserts that these, which are kept step by step, are what can be counted."""
        running = self._running()
        extra = sum(sequence.num_rows - 1 for sequence in running)
        assert extra_rows == extra, f"{extra} further rows, {extra_rows} counted"
        backlog = sum(sequence.backlog for sequence in self.waiting + running)
        assert waiting_tokens == backlog, f"waiting_tokens {waiting_tokens} drifted from {backlog}"
        computed = sum(sequence.num_computed for sequence in running)
        assert running_tokens == computed, f"running_tokens {running_tokens} drifted from {computed}"
        queued = {id(sequence.parent) for sequence in self.waiting if not sequence.parent.is_admitted}
        assert num_queued_requests == len(queued), f"{num_queued_requests} queued, {len(queued)} found"

    def block_tables(self) -> list[list[int]]:
        """Of all that run, hypotheses too."""
        running = self._running()
        searches = (sequence.search for sequence in running if sequence.search is not None)
        tables = [sequence.held_blocks for sequence in running]
        return tables + [table for search in searches for table in search.tables]

    def _running(self) -> list[Sequence]:
        return self.prefilling + self.decoding + self.searching


def check_limits(schedule: ScheduleConfig, block_size: int) -> None:
    """Raises ValueError for a limit that lets nothing happen."""
    limits = (
        ("max_step_tokens", schedule.max_step_tokens),
        ("max_running", schedule.max_running),
        ("max_prefill_chunk", schedule.max_prefill_chunk),
        ("max_waiting", schedule.max_waiting),
        ("expected_output_tokens", schedule.expected_output_tokens),
        ("block_size", block_size),
    )
    for name, limit in limits:
        if limit is not None and limit < 1:
            raise ValueError(f"{name} is {limit}: it must be at least 1")
