"""From a folder to a decoder over a paged pool, in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.models.paging import PagedModel
from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import load_decoder
from workers.model.parallel import TensorParallel


def paged_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    parallel: TensorParallel | None = None,
    quantization: Quantization = Quantization.NONE,
    kv_dtype: torch.dtype | None = None,
) -> PagedModel:
    """Opens a checkpoint as a server does and puts its decoder over a pool of 256 blocks; kv_dtype: of the
    pool, None: that of the model."""
    checkpoint = Checkpoint(folder)
    parallel = parallel or TensorParallel()
    decoder = load_decoder(checkpoint, dtype, torch.device("cpu"), parallel, quantization=quantization)
    return PagedModel(decoder, block_size=block_size, dtype=kv_dtype or dtype)


def logits_of(model: PagedModel, token_ids: list[int], *, chunk: int | None = None) -> torch.Tensor:
    """Logits of every token of one sequence, (tokens, vocabulary)."""
    sequence = model.start(token_ids)
    model.read([sequence], chunk)
    model.release(sequence)
    return torch.stack(sequence.logits)
