"""Ranks as threads of this process, with any kernels: their logits, and engines over them.

The ranks meet in shared memory as processes do. What tests replace here (kernels that add in another order)
could not be handed to a process.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.models.engine_groups import BLOCK_SIZE
from tests.models.paging import PagedModel
from workers.engine.proposals import DraftModel
from workers.kernels import (
    CacheForm,
    Draw,
    Drawn,
    Kernels,
    PagedCache,
    Quantization,
    SharedCollective,
    StepMessage,
    load_library,
    memory_bytes,
)
from workers.kernels.native import CpuKernels
from workers.model.architecture import ModelSpec
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import Decoder, load_decoder
from workers.model.medusa import load_heads
from workers.model.medusa_folder import MedusaFolder
from workers.model.parallel import TensorParallel
from workers.runtime.draft_model import DraftRunner
from workers.runtime.executor import GroupExecutor
from workers.runtime.medusa import MedusaRunner
from workers.runtime.runner import ModelRunner
from workers.runtime.shared_pool import PartForm

KernelSet = Callable[[torch.dtype], Kernels]
NUM_BLOCKS = 320
_SHARED_TOKENS, _SHARED_LOGITS = 64, 16
_TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


def native(dtype: torch.dtype) -> Kernels:
    """As served."""
    return CpuKernels(load_library(), dtype)


class ThreadRanks:
    """The ranks of one group, each with a pool. Stands in for `ModelRunner` and, in PagedModel, `Decoder`."""

    def __init__(
        self,
        folder: Path,
        size: int,
        dtype: torch.dtype,
        kernels: KernelSet,
        *,
        block_size: int = BLOCK_SIZE,
        weights: str = "none",
        kv: str = "auto",
    ) -> None:
        checkpoint, library = Checkpoint(folder), load_library()
        self.checkpoint, self.dtype, self.block_size, self.num_blocks = (
            checkpoint,
            dtype,
            block_size,
            NUM_BLOCKS,
        )
        self.kv_dtype = dtype if kv == "auto" else torch.int8
        memory = mmap.mmap(-1, memory_bytes(library, size))
        decoders = []
        for rank in range(size):
            shared = SharedCollective(library, memory, rank=rank, size=size, timeout_s=_TIMEOUT_S)
            parallel = TensorParallel(rank, size, shared) if size > 1 else TensorParallel()
            decoders.append(
                load_decoder(checkpoint, dtype, _CPU, parallel, kernels(dtype), Quantization(weights))
            )
        self.num_kv_heads = decoders[0].num_kv_heads
        self._runners = _runners(decoders, self.kv_dtype, block_size)
        self.kernels = self._runners[0].kernels
        self.pool = self._runners[0].pool
        self._threads = ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,))

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def run(
        self, message: StepMessage, draws: Sequence[Draw] = (), *, ids_only: bool = False
    ) -> Drawn | None:
        """As `ModelRunner.run` on every rank; what rank 0 returned."""
        others = [self._threads.submit(runner.run, message) for runner in self._runners[1:]]
        drawn = self._runners[0].run(message, draws, ids_only=ids_only)
        for other in others:
            other.result(_TIMEOUT_S)
        return drawn

    def forward(self, message: StepMessage, kv: PagedCache) -> Drawn | None:
        """For a PagedModel, whose own pool is not used."""
        return self.run(message)

    def paged(self) -> PagedModel:
        return PagedModel(self, num_blocks=NUM_BLOCKS, block_size=self.block_size, dtype=self.kv_dtype)  # type: ignore[arg-type]

    def executor(self, draft: DraftModel | None = None, heads: MedusaRunner | None = None) -> GroupExecutor:
        return GroupExecutor(self, draft_model=draft, draft_heads=heads)  # type: ignore[arg-type]

    def draft(self, folder: Path) -> DraftRunner:
        """A draft model beside them."""
        checkpoint = Checkpoint(folder, self.checkpoint)
        decoder = load_decoder(checkpoint, self.dtype, _CPU, TensorParallel(), native(self.dtype))
        form = _form(decoder.spec, decoder.num_kv_heads, self.dtype, self.block_size)
        return DraftRunner(decoder, PagedCache.zeros(NUM_BLOCKS, form))

    def heads(self, folder: Path) -> MedusaRunner:
        found = load_heads(MedusaFolder(folder, self.checkpoint), self.kernels, self.dtype, _CPU)
        return MedusaRunner(found)

    def close(self) -> None:
        self._threads.shutdown()


@contextmanager
def thread_ranks(
    folder: Path,
    size: int,
    dtype: torch.dtype,
    kernels: KernelSet = native,
    *,
    block_size: int = BLOCK_SIZE,
    weights: str = "none",
    kv: str = "auto",
) -> Iterator[ThreadRanks]:
    """weights, kv: as `model.quantization` and `cache.dtype`."""
    ranks = ThreadRanks(folder, size, dtype, kernels, block_size=block_size, weights=weights, kv=kv)
    try:
        yield ranks
    finally:
        ranks.close()


def _runners(decoders: Sequence[Decoder], dtype: torch.dtype, block_size: int) -> list[ModelRunner]:
    """They share what ranks of one machine do; there is no room for the largest steps."""
    forms = [_form(decoder.spec, decoder.num_kv_heads, dtype, block_size) for decoder in decoders]
    if not all(decoder.shares_attention for decoder in decoders):
        pools = [PagedCache.zeros(NUM_BLOCKS, form) for form in forms]
    else:
        parts = tuple(
            PartForm(
                num_blocks=NUM_BLOCKS,
                block_bytes=form.block_bytes,
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_dim=decoder.spec.head_dim,
                max_tokens=_SHARED_TOKENS,
                vocab_size=decoder.spec.vocab_size,
                num_logits=_SHARED_LOGITS if decoder is decoders[0] else 0,
            )
            for form, decoder in zip(forms, decoders, strict=True)
        )
        shared = tuple(part.part(torch.zeros(part.num_bytes, dtype=torch.uint8)) for part in parts)
        for decoder in decoders:
            decoder.share_attention(shared, _SHARED_TOKENS)
        pools = [PagedCache(part.pool, form) for part, form in zip(shared, forms, strict=True)]
    return [ModelRunner(decoder, pool) for decoder, pool in zip(decoders, pools, strict=True)]


def _form(spec: ModelSpec, num_kv_heads: int, dtype: torch.dtype, block_size: int) -> CacheForm:
    return CacheForm(
        num_kv_heads=num_kv_heads,
        num_layers=spec.num_layers,
        block_size=block_size,
        head_dim=spec.head_dim,
        dtype=dtype,
    )
