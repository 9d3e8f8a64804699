"""Runs the steps of one rank: its decoder over its KV pool."""

from __future__ import annotations

import numpy as np
import torch

from workers.kernels import Kernels
from workers.model.decoder import Decoder
from workers.runtime.batch import build_batch, check_range
from workers.runtime.step_codec import StepArrays


class ModelRunner:
    """Owns decoder and pool of this rank. All ranks of a group run the same arrays in the same order."""

    def __init__(self, decoder: Decoder, pool: torch.Tensor, device: torch.device) -> None:
        """pool: (num_blocks, kv heads of this rank, layers, 2, block_size, head_dim)."""
        self._decoder = decoder
        self._pool = pool
        self._device = device

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
    def device(self) -> torch.device:
        return self._device

    @property
    def pool(self) -> torch.Tensor:
        """The pool itself, not a copy: transfers read and write blocks that no step is using."""
        return self._pool

    def run(self, arrays: StepArrays) -> torch.Tensor | None:
        """Logits (R, vocabulary) float32 on rank 0, None elsewhere."""
        if len(arrays.zero_blocks):
            check_range("block to zero", arrays.zero_blocks, self.num_blocks)
            self._pool[torch.from_numpy(arrays.zero_blocks.astype(np.int64)).to(self._device)] = 0
        batch = build_batch(
            arrays,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            vocab_size=self._decoder.spec.vocab_size,
            device=self._device,
        )
        return self._decoder.forward(batch, self._pool)
