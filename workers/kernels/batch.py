"""The tensors of one step, as the single operators take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.kernels.step_message import Ints, StepArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Tokens of S sequences laid end to end (T in all) with their place in the paged KV pool.

    Sequence s owns rows query_starts[s] .. query_starts[s + 1] - 1. Row r holds the token at positions[r] and
    attends to positions 0 .. positions[r] of its sequence. All tensors on the model's device.
    """

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    # (T,) int64: block * block_size + offset, where the token's K and V go; -1 (GPU graphs): nowhere
    slots: torch.Tensor
    query_starts: torch.Tensor  # (S + 1,) int32
    context_lens: torch.Tensor  # (S,) int32: tokens of the sequence in the pool after this step
    block_tables: torch.Tensor  # (S, W) int32; entries past the context are 0
    logit_rows: torch.Tensor  # (R,) int64: rows whose logits are wanted
    max_context_len: int
    # (T,) int32: row of the slice that each token follows, -1: its first; None: each the one before
    parents: torch.Tensor | None = None
    lengths: torch.Tensor | None = None  # (S,) int32: tokens of the sequence; None: as context_lens
    max_length: int = 0  # of those; 0: max_context_len
    host: StepArrays | None = None  # what it was made of; None: a graph's, of which the host knows nothing


def build_batch(
    arrays: StepArrays,
    *,
    block_size: int,
    num_blocks: int,
    vocab_size: int,
    device: torch.device,
    num_drawn: int = 0,
) -> StepBatch:
    """The batch of a step; `cpu/layout.h` does the same for a step in one call. num_drawn: of the step
    before: so many placeholders may be among the ids (`fill_ids`).

    Raises ValueError when an index lies outside the pool or the vocabulary: kernels do not check indices, and
    a wrong one would write into another sequence's memory.
    """
    lens, starts, counts = arrays.lens, arrays.starts, arrays.block_counts
    num_slices = len(lens)
    check_range("block", arrays.blocks, num_blocks)
    check_range("token id", arrays.token_ids, vocab_size, -num_drawn)
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
    places = in_slice + starts[sequence]
    slots = tables[sequence, places // block_size].astype(np.int64) * block_size + places % block_size
    positions = places
    if len(arrays.parents):
        positions = depths(arrays.parents, lens) + starts[sequence]

    def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.int32 | np.int64]]) -> torch.Tensor:
        found = torch.from_numpy(values)
        # From pinned memory the copy need not be waited for; torch keeps it until then.
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found

    return StepBatch(
        token_ids=tensor(arrays.token_ids.astype(np.int64)),
        positions=tensor(positions),
        slots=tensor(slots),
        query_starts=tensor(query_starts),
        context_lens=tensor(context_lens),
        block_tables=tensor(tables),
        logit_rows=tensor(arrays.logit_rows.astype(np.int64)),
        max_context_len=int(context_lens.max(initial=0)),
        parents=tensor(arrays.parents.copy()) if len(arrays.parents) else None,
        lengths=tensor(arrays.lengths.copy()) if len(arrays.lengths) else None,
        max_length=int(arrays.lengths.max(initial=0)),
        host=arrays,
    )


def depths(parents: Ints, lens: Ints) -> npt.NDArray[np.int64]:
    """(T,): how many tokens of its slice each one has before it. Raises ValueError for parents that come
    after their children."""
    found = np.zeros(len(parents), dtype=np.int64)
    row = 0
    for length in lens.tolist():
        own = found[row : row + length]
        for index, parent in enumerate(parents[row : row + length].tolist()):
            if (parent != -1) if index == 0 else not 0 <= parent < index:
                raise ValueError(f"step whose token {index} of a slice follows the token {parent}")
            own[index] = own[parent] + 1 if index else 0
        row += length
    return found


def fill_ids(token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """Fills in the placeholders among token_ids (T,), as `step_message.fill_in` does, where they lie: waits
    for nothing. drawn (R,): ids of the step before, on the same device."""
    known = drawn[(-1 - token_ids).clamp_(min=0)].clamp_(min=0)
    token_ids.copy_(torch.where(token_ids < 0, known, token_ids))


def check_range(what: str, values: Ints, limit: int, least: int = 0) -> None:
    """Raises ValueError unless all values are in least .. limit - 1."""
    if len(values) and not (int(values.min()) >= least and int(values.max()) < limit):
        raise ValueError(
            f"step with a {what} outside {least} .. {limit - 1}: {values.min()} .. {values.max()}"
        )
