"""Runs the steps of one rank: its decoder over its KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from workers.kernels import (
    Draw,
    Drawn,
    Ints,
    Kernels,
    StepArrays,
    StepMessage,
    check_range,
    header_of,
    unpack,
)


class StepDecoder(Protocol):
    """`workers.model.decoder.Decoder`, or what replays its steps."""

    @property
    def kernels(self) -> Kernels: ...

    def forward(self, message: StepMessage, kv: torch.Tensor, draws: Sequence[Draw] = ()) -> Drawn | None: ...

    def meet(self, device: torch.device) -> None: ...


class ModelRunner:
    """Owns decoder and pool of this rank. All ranks of a group run the same messages in the same order."""

    def __init__(self, decoder: StepDecoder, pool: torch.Tensor) -> None:
        """pool: (num_blocks, kv heads of this rank, layers, 2, block_size, head_dim)."""
        self._decoder = decoder
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        return self._pool.shape[0]

    @property
    def block_size(self) -> int:
        return self._pool.shape[4]

    @property
    def kernels(self) -> Kernels:
        """Of the decoder: sampling uses them too."""
        return self._decoder.kernels

    @property
    def pool(self) -> torch.Tensor:
        """The pool itself, not a copy: transfers read and write blocks that no step is using."""
        return self._pool

    def run(self, message: StepMessage, draws: Sequence[Draw] = ()) -> Drawn | None:
        """As `Decoder.forward`, after the blocks that are to be zero or a copy have become so."""
        header = header_of(message)
        if header.num_zero_blocks or header.num_copies or header.num_moves:
            self._prepare_blocks(unpack(message))
        if header.num_tokens == 0:
            self._decoder.meet(self._pool.device)
            return None
        return self._decoder.forward(message, self._pool, draws)

    def _prepare_blocks(self, arrays: StepArrays) -> None:
        if len(arrays.zero_blocks):
            check_range("block to zero", arrays.zero_blocks, self.num_blocks)
            self._pool[self._indices(arrays.zero_blocks)] = 0
        if len(arrays.copy_sources):
            check_range("block to copy", arrays.copy_sources, self.num_blocks)
            check_range("block to copy to", arrays.copy_targets, self.num_blocks)
            self._pool[self._indices(arrays.copy_targets)] = self._pool[self._indices(arrays.copy_sources)]

        if len(arrays.move_sources):
            check_range("slot to move", arrays.move_sources, self.num_blocks * self.block_size)
            check_range("slot to move to", arrays.move_targets, self.num_blocks * self.block_size)
            self._pool[self._places(arrays.move_targets)] = self._pool[self._places(arrays.move_sources)]

    def _places(self, slots: Ints) -> tuple[torch.Tensor | slice, ...]:
        """As an index of the pool: keys and values of these slots, of all heads and layers."""
        at, everything = self._indices(slots), slice(None)
        return (at // self.block_size, everything, everything, everything, at % self.block_size)

    def _indices(self, blocks: Ints) -> torch.Tensor:
        return torch.tensor(blocks.tolist(), device=self._pool.device)
