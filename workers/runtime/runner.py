"""Runs the steps of one rank: its decoder over its KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.kernels import Draw, Drawn, Kernels, StepMessage, check_range, header_of, unpack
from workers.model.decoder import Decoder


class ModelRunner:
    """Owns decoder and pool of this rank. All ranks of a group run the same messages in the same order."""

    def __init__(self, decoder: Decoder, pool: torch.Tensor) -> None:
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
        """As `Decoder.forward`, after the blocks that are to be zero have become so."""
        if header_of(message).num_zero_blocks:
            zero_blocks = unpack(message).zero_blocks
            check_range("block to zero", zero_blocks, self.num_blocks)
            self._pool[torch.tensor(zero_blocks.tolist(), device=self._pool.device)] = 0
        return self._decoder.forward(message, self._pool, draws)
