"""Many decode steps at once, where nothing but time passes.

While a group only decodes, every step gives each sequence one token, and nothing is decided until a sequence
ends, memory runs short, or a command comes. `Leap` finds how many steps that is, works out when each one
ends, and takes them in stretches, with the same result as `Engine.step()` one by one: the
same tokens, blocks, seals, sums and moving mean. This file knows the inside of the engine; a test holds it
against stepping.

Not the same: which block of the pool a sequence gets, and the numbers of block events, of which several may
be one.
"""

from __future__ import annotations

from cluster.figures.step_cost import StepCost, StepShape
from cluster.simulate.executor import TOKEN
from workers.engine.engine import Engine


class Leap:
    """Steps that an engine takes unattended: any number of stretches, as long as it is asked for nothing
    else."""

    def __init__(self, engine: Engine, cost: StepCost) -> None:
        scheduler = engine._scheduler
        self._engine = engine
        self._cost = cost
        self._sequences = scheduler._decoding
        self._context = sum(sequence.num_computed + 1 for sequence in self._sequences)
        self._num_left = self._count()
        self._durations: list[float] = []
        self.ends_s: list[float] = []  # of the steps of the stretch: some of the last may be taken off it

    @property
    def has_more(self) -> bool:
        """Whether another stretch is possible once this one is taken."""
        return self._num_left > len(self.ends_s)

    def begin(self, start_s: float, until_s: float) -> None:
        """The next stretch: steps up to the first that ends at `until_s` or later; at least one."""
        rows, seconds = len(self._sequences), self._cost.seconds
        context, end_s = self._context, start_s
        self.ends_s, self._durations = [], []
        for _ in range(self._num_left):
            start_s = end_s
            end_s = start_s + seconds(StepShape(decode_rows=rows, context_tokens=context))
            context += rows
            self.ends_s.append(end_s)
            self._durations.append(end_s - start_s)
            if end_s >= until_s:
                break

    def take(self) -> None:
        """Brings the engine to the end of the stretch."""
        engine, num_steps = self._engine, len(self.ends_s)
        scheduler, pool, size = engine._scheduler, engine._pool, engine._block_size
        scheduler.num_steps += num_steps
        engine._totals.num_generated += num_steps * len(self._sequences)
        tokens = [TOKEN] * num_steps
        for sequence in self._sequences:
            sequence.output += tokens
            table = sequence.block_table
            for _ in range(-(-(sequence.num_computed + num_steps) // size) - len(table)):
                table.append(pool.allocate())
            scheduler.advance(sequence, num_steps)
        for duration in self._durations[:num_steps]:
            engine._totals.add_step(duration)
        self._context += num_steps * len(self._sequences)
        self._num_left -= num_steps
        self.ends_s = []

    def _count(self) -> int:
        """Steps before anything can happen: the last token of a sequence and the last unused blocks are left
        to real steps."""
        engine = self._engine
        scheduler, pool, size = engine._scheduler, engine._pool, engine._block_size
        is_busy = scheduler.num_waiting or scheduler._prefilling or not self._sequences
        if is_busy or engine._exchange.leases.num_growing or pool._to_zero:
            return 0
        left = min(s.parent.request.sampling.max_tokens - len(s.output) for s in self._sequences) - 1
        # A sequence that takes n more tokens needs at most n // size + 1 more blocks.
        room = (pool.num_unused // len(self._sequences) - 1) * size
        return max(min(left, room), 0)
