"""From the arrays of a step to the tensors that kernels take. A handful of numpy calls, none per sequence."""

from __future__ import annotations

import numpy as np
import torch

from workers.kernels import StepBatch
from workers.runtime.step_codec import StepArrays


def build_batch(
    arrays: StepArrays, *, block_size: int, num_blocks: int, vocab_size: int, device: torch.device
) -> StepBatch:
    """The batch of a step. Raises ValueError when an index lies outside the pool or the vocabulary.

    Kernels do not check indices: a wrong one would write into another sequence's memory.
    """
    lens, starts, counts = arrays.lens, arrays.starts, arrays.block_counts
    num_slices = len(lens)
    check_range("block", arrays.blocks, num_blocks)
    check_range("token id", arrays.token_ids, vocab_size)
    check_range("logit row", arrays.logit_rows, len(arrays.token_ids))
    context_lens = starts + lens
    if bool((lens < 1).any() or (starts < 0).any() or (counts * block_size < context_lens).any()):
        raise ValueError(f"step with lengths {lens}, starts {starts}, block counts {counts}")
    query_starts = np.zeros(num_slices + 1, dtype=np.int32)
    np.cumsum(lens, out=query_starts[1:])
    width = int(counts.max(initial=1))
    tables = np.zeros((num_slices, width), dtype=np.int32)
    tables[np.arange(width) < counts[:, None]] = arrays.blocks
    sequence = np.repeat(np.arange(num_slices), lens)  # (T,) slice of each row
    in_slice = np.arange(len(arrays.token_ids), dtype=np.int64) - query_starts[sequence]
    positions = in_slice + starts[sequence]
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.int32 | np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return StepBatch(
        token_ids=tensor(arrays.token_ids.astype(np.int64)),
        positions=tensor(positions),
        slots=tensor(slots),
        query_starts=tensor(query_starts),
        context_lens=tensor(context_lens),
        block_tables=tensor(tables),
        logit_rows=tensor(arrays.logit_rows.astype(np.int64)),
        max_context_len=int(context_lens.max(initial=0)),
    )


def check_range(what: str, values: np.ndarray[tuple[int, ...], np.dtype[np.int32]], limit: int) -> None:
    """Raises ValueError unless all values are in 0 .. limit - 1."""
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < limit):
        raise ValueError(f"step with a {what} outside 0 .. {limit - 1}: {values.min()} .. {values.max()}")
