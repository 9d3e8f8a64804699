"""A step as flat int32 arrays: what followers need of a plan, and how it travels.

Message: header (S, total tokens, total block entries, R, Z), then S lengths, S start positions, S block
counts, token ids, block entries, R logit rows, Z blocks to zero; all int32, little-endian on every machine
we run on. Sampling and targets stay on rank 0.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from workers.engine.step import StepPlan
from workers.runtime.frames import ProtocolError

Ints = npt.NDArray[np.int32]
_HEADER_INTS = 5
MAX_LOGIT_ROWS = 512  # logits of more rows (prompt scoring) are made in several passes, to bound their memory
assert sys.byteorder == "little" and array("i").itemsize == 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """S slices of sequences laid end to end."""

    lens: Ints  # (S,) tokens of each slice, at least 1
    starts: Ints  # (S,) position of the first token
    block_counts: Ints  # (S,) blocks that hold positions 0 .. start + len - 1
    token_ids: Ints  # (sum of lens,)
    blocks: Ints  # (sum of block_counts,)
    logit_rows: Ints  # (R,) rows of the step whose logits are wanted
    zero_blocks: Ints  # (Z,) blocks to fill with zeros before anything is written

    def passes(self, max_rows: int = MAX_LOGIT_ROWS) -> list[StepArrays]:
        """The same step with at most `max_rows` logit rows at a time.

        A second pass computes the step again, with the same keys and values. All ranks cut alike.
        """
        if len(self.logit_rows) <= max_rows:
            return [self]
        cuts = range(0, len(self.logit_rows), max_rows)
        return [
            replace(
                self,
                logit_rows=self.logit_rows[cut : cut + max_rows],
                zero_blocks=self.zero_blocks if cut == 0 else self.zero_blocks[:0],
            )
            for cut in cuts
        ]


def arrays_of(plan: StepPlan, block_size: int) -> StepArrays:
    """Flattens a plan. Per slice: rows of its prompt targets, then its last row when it samples."""
    lens, starts, counts, rows = array("i"), array("i"), array("i"), array("i")
    token_ids, blocks = array("i"), array("i")
    for piece in plan.slices:
        first_row, length = len(token_ids), len(piece.token_ids)
        needed = -(-(piece.start + length) // block_size)
        table = piece.block_table
        assert length > 0 and len(table) >= needed, f"{len(table)} blocks for {piece.start} + {length} tokens"
        lens.append(length)
        starts.append(piece.start)
        counts.append(needed)
        token_ids.extend(piece.token_ids)
        blocks.extend(table if len(table) == needed else table[:needed])
        if piece.prompt_targets is not None:
            rows.extend(range(first_row, first_row + len(piece.prompt_targets)))
        if piece.sample is not None:
            rows.append(first_row + length - 1)
    return StepArrays(
        lens=_ints(lens),
        starts=_ints(starts),
        block_counts=_ints(counts),
        token_ids=_ints(token_ids),
        blocks=_ints(blocks),
        logit_rows=_ints(rows),
        zero_blocks=_ints(array("i", plan.zero_blocks)),
    )


def encode(arrays: StepArrays) -> bytes:
    """The message of a step."""
    sizes = (
        len(arrays.lens),
        len(arrays.token_ids),
        len(arrays.blocks),
        len(arrays.logit_rows),
        len(arrays.zero_blocks),
    )
    parts = (
        np.array(sizes, dtype=np.int32),
        arrays.lens,
        arrays.starts,
        arrays.block_counts,
        arrays.token_ids,
        arrays.blocks,
        arrays.logit_rows,
        arrays.zero_blocks,
    )
    return np.concatenate(parts).tobytes()


def decode(body: bytes) -> StepArrays:
    """Raises ProtocolError unless the parts fill the message exactly and fit each other."""
    if len(body) % 4 or len(body) < 4 * _HEADER_INTS:
        raise ProtocolError(f"a step of {len(body)} bytes")
    values = np.frombuffer(body, dtype=np.int32)
    num_slices, num_tokens, num_entries, num_rows, num_zeros = values[:_HEADER_INTS].tolist()
    sizes = (num_slices, num_slices, num_slices, num_tokens, num_entries, num_rows, num_zeros)
    if min(sizes) < 0 or _HEADER_INTS + sum(sizes) != len(values):
        raise ProtocolError(f"a step of {len(values)} integers says its parts are {sizes}")
    parts = np.split(values, np.cumsum((_HEADER_INTS, *sizes))[:-1])[1:]
    arrays = StepArrays(
        lens=parts[0],
        starts=parts[1],
        block_counts=parts[2],
        token_ids=parts[3],
        blocks=parts[4],
        logit_rows=parts[5],
        zero_blocks=parts[6],
    )
    if int(arrays.lens.sum()) != num_tokens or int(arrays.block_counts.sum()) != num_entries:
        raise ProtocolError("a step whose lengths do not add up")
    return arrays


def _ints(values: array[int]) -> Ints:
    return np.frombuffer(values, dtype=np.int32) if values else np.empty(0, dtype=np.int32)
