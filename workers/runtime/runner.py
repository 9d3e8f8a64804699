"""Runs the steps of one rank: its decoder over its KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from workers.kernels import (
    MAX_LOGIT_ROWS,
    Draw,
    Drawn,
    Ints,
    Kernels,
    PagedCache,
    StepArrays,
    StepMessage,
    check_range,
    has_placeholders,
    header_of,
    unpack,
)
from workers.runtime.drawn_ids import ArrivingIds, DrawnIds


class StepDecoder(Protocol):
    """`workers.model.decoder.Decoder`, or what replays its steps."""

    @property
    def kernels(self) -> Kernels: ...

    def forward(
        self,
        message: StepMessage,
        kv: PagedCache,
        draws: Sequence[Draw] = (),
        drawn: torch.Tensor | None = None,
        *,
        ids_only: bool = False,
    ) -> Drawn | None: ...

    def share(self, x: torch.Tensor) -> None:
        """Rank 0's x on all ranks, in place."""
        ...

    def meet(self, device: torch.device) -> None:
        """Returns when all ranks have done to their pools what they were given to do."""
        ...


class ModelRunner:
    """Owns decoder and pool of this rank. All ranks of a group run the same messages in the same order."""

    def __init__(self, decoder: StepDecoder, pool: PagedCache) -> None:
        self._decoder = decoder
        self._pool = pool
        self._drawn = DrawnIds(pool.device)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def kernels(self) -> Kernels:
        """Of the decoder: sampling uses them too."""
        return self._decoder.kernels

    @property
    def pool(self) -> PagedCache:
        """The pool itself, not a copy: transfers read and write blocks that no step is using."""
        return self._pool

    def run(
        self, message: StepMessage, draws: Sequence[Draw] = (), *, ids_only: bool = False
    ) -> Drawn | None:
        """As `Decoder.forward`, after the blocks that are to be zero or a copy have become so. A message with
        placeholders comes without draws: what is planned ahead is drawn by `start`."""
        header = header_of(message)
        if header.num_zero_blocks or header.num_copies or header.num_moves:
            self._prepare_blocks(unpack(message))
        if header.num_tokens == 0:
            self._decoder.meet(self._pool.device)
            return None
        if not draws and has_placeholders(message):
            self._decoder.share(self._drawn.on_device)
            return self._decoder.forward(message, self._pool, draws, self._drawn.on_device)
        return self._decoder.forward(message, self._pool, draws, ids_only=ids_only)

    def start(self, message: StepMessage, draws: Sequence[Draw]) -> ArrivingIds:
        """On rank 0: begins a step and returns while it is computed, where the decoder waits for nothing. The
        others `run` it. draws: one a logit row, of which there is one at least; the next step may have
        placeholders for what is drawn. A message of more logit rows than a pass makes is refused."""
        assert 1 <= len(draws) <= MAX_LOGIT_ROWS, f"{len(draws)} rows of logits"
        drawn = self.run(message)
        assert drawn is not None, "rank 0 gets the logits"
        return self._drawn.keep(self.kernels.draw_ids(drawn.logits, draws))

    def _prepare_blocks(self, arrays: StepArrays) -> None:
        memory = self._pool.memory
        if len(arrays.zero_blocks):
            check_range("block to zero", arrays.zero_blocks, self.num_blocks)
            memory[self._indices(arrays.zero_blocks)] = 0
        if len(arrays.copy_sources):
            check_range("block to copy", arrays.copy_sources, self.num_blocks)
            check_range("block to copy to", arrays.copy_targets, self.num_blocks)
            memory[self._indices(arrays.copy_targets)] = memory[self._indices(arrays.copy_sources)]

        if len(arrays.move_sources):
            check_range("slot to move", arrays.move_sources, self.num_blocks * self.block_size)
            check_range("slot to move to", arrays.move_targets, self.num_blocks * self.block_size)
            self._pool.move_rows(arrays.move_sources.tolist(), arrays.move_targets.tolist())

    def _indices(self, places: Ints) -> torch.Tensor:
        return torch.tensor(places.tolist(), device=self._pool.device)
