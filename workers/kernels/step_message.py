"""A step as flat int32 arrays: what every rank needs of a plan, as it travels and as C++ takes it.

Message: header (S, T, B, R, Z, C, longest context, P, M), then S lengths, S start positions, S block counts,
T token ids, B block entries, R logit rows, Z blocks to zero, C blocks to copy and C to copy them to, P
parents, M slots to move and M to move them to; all int32, little-endian on every machine we run on.
`cpu/layout.h` reads the same bytes. Sampling and targets stay on rank 0.

Lengths. For models that turn keys by the length of their sequence, S more may follow: the tokens that each
sequence has, computed or not. C++ does not know such models.

Placeholders. A token id of -1 - i, in a step that is planned while the one before it is computed, stands for
the id that is drawn there from row i of the logits: whoever has it fills it in.

Trees. A slice may have several guesses for one place. Its tokens lie in slots one behind the other, whatever
their positions are: a token's position is one more than that of its parent, and it sees what lies before the
slice, its ancestors and itself. P is 0 when no slice of a step is a tree, else T.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
StepMessage = NewType("StepMessage", bytes)
MAX_LOGIT_ROWS = 512  # logits of more rows (prompt scoring) are made in several passes, to bound their memory
_HEADER = struct.Struct("<9i")
assert sys.byteorder == "little" and array("i").itemsize == 4


class StepHeader(NamedTuple):
    """How much of everything a step has."""

    num_slices: int
    num_tokens: int
    num_block_entries: int
    num_logit_rows: int
    num_zero_blocks: int
    num_copies: int
    longest_context: int  # of its sequences, after the step
    num_parents: int
    num_moves: int


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
    copy_sources: Ints  # (C,) blocks to copy whole, after that and before anything is written
    copy_targets: Ints  # (C,) where to; none of them is a source
    parents: Ints  # (T,) or (0,): row of the slice that each token follows, before it; -1: the slice's first
    move_sources: Ints  # (M,) slots whose keys and values move, all at once and before anything is written
    move_targets: Ints  # (M,) where to
    lengths: Ints  # (S,) or (0,): tokens of each sequence, in the step or still to come


@lru_cache(maxsize=1)  # the stages of a step ask one after the other
def header_of(message: StepMessage) -> StepHeader:
    """Raises ValueError for a message without one; of the rest nothing is checked."""
    if len(message) < _HEADER.size:
        raise ValueError(f"a step of {len(message)} bytes has no header")
    return StepHeader._make(_HEADER.unpack_from(message))


def has_lengths(message: StepMessage) -> bool:
    """Whether it says the lengths of its sequences; of the rest nothing is checked."""
    header = header_of(message)
    sizes = 3 * header.num_slices + sum(header[1:6]) + header.num_copies + header.num_parents
    return len(message) > _HEADER.size + 4 * (sizes + 2 * header.num_moves)


def has_placeholders(message: StepMessage) -> bool:
    """Whether ids have to be filled in. Without numpy: followers ask before every step, with cold caches."""
    header = header_of(message)
    start = _ids_start(header)
    highest = message[start + 3 : start + 4 * header.num_tokens : 4]  # byte of each id
    return not highest.isascii()


def fill_in(message: StepMessage, drawn: Sequence[int]) -> StepMessage:
    """The message with its placeholders filled in; drawn: ids by row of logits of the step before. One that
    is none, because the logits were no numbers, becomes 0: nobody will want what comes of it."""
    filled = bytearray(message)
    ids = _token_ids(filled)
    for place in np.flatnonzero(ids < 0).tolist():
        ids[place] = max(0, drawn[-1 - int(ids[place])])
    return StepMessage(bytes(filled))


def _token_ids(message: bytes | bytearray) -> Ints:
    """Where they lie in the message, which has to be whole."""
    header = StepHeader._make(_HEADER.unpack_from(message))
    return np.frombuffer(message, dtype=np.int32, count=header.num_tokens, offset=_ids_start(header))


def _ids_start(header: StepHeader) -> int:
    return _HEADER.size + 4 * 3 * header.num_slices


def pack_step(
    *,
    lens: Sequence[int],
    starts: Sequence[int],
    block_counts: Sequence[int],
    token_ids: Sequence[int],
    blocks: Sequence[int],
    logit_rows: Sequence[int],
    zero_blocks: Sequence[int] = (),
    copy_blocks: Sequence[tuple[int, int]] = (),
    parents: Sequence[int] = (),
    moves: Sequence[tuple[int, int]] = (),
    lengths: Sequence[int] = (),
) -> StepMessage:
    """The message of a step; parts as in StepArrays, copies and moves as (source, target)."""
    longest = max(map(int.__add__, starts, lens), default=0)
    sizes = (len(lens), len(token_ids), len(blocks), len(logit_rows), len(zero_blocks), len(copy_blocks))
    values = array("i", (*sizes, longest, len(parents), len(moves)))
    for part in (lens, starts, block_counts, token_ids, blocks, logit_rows, zero_blocks):
        values.extend(part)
    if copy_blocks:
        values.extend(source for source, _ in copy_blocks)
        values.extend(target for _, target in copy_blocks)
    values.extend(parents)
    if moves:
        values.extend(source for source, _ in moves)
        values.extend(target for _, target in moves)
    values.extend(lengths)
    return StepMessage(values.tobytes())


def unpack(message: StepMessage) -> StepArrays:
    """Raises ValueError unless the parts fill the message exactly and fit each other."""
    header = header_of(message)
    num_slices = header.num_slices
    moves = header.num_moves
    sizes = (*[num_slices] * 3, *header[1:6], header.num_copies, header.num_parents, moves, moves)
    start = _HEADER.size // 4
    num_lengths = len(message) // 4 - start - sum(sizes)
    if min(sizes) < 0 or len(message) % 4 or num_lengths not in (0, num_slices):
        raise ValueError(f"a step of {len(message)} bytes says its parts have {sizes} integers")
    values = np.frombuffer(message, dtype=np.int32)
    parts = np.split(values, np.cumsum((start, *sizes, num_lengths))[:-1])[1:]
    arrays = StepArrays(
        lens=parts[0],
        starts=parts[1],
        block_counts=parts[2],
        token_ids=parts[3],
        blocks=parts[4],
        logit_rows=parts[5],
        zero_blocks=parts[6],
        copy_sources=parts[7],
        copy_targets=parts[8],
        parents=parts[9],
        move_sources=parts[10],
        move_targets=parts[11],
        lengths=parts[12],
    )
    if num_lengths and bool((arrays.lengths < arrays.starts + arrays.lens).any()):
        raise ValueError("a step of more tokens than its sequences have")
    if (
        int(arrays.lens.sum()) != header.num_tokens
        or int(arrays.block_counts.sum()) != header.num_block_entries
        or int((arrays.starts.astype(np.int64) + arrays.lens).max(initial=0)) != header.longest_context
    ):
        raise ValueError("a step whose lengths do not add up")
    if header.num_parents not in (0, header.num_tokens):
        raise ValueError(f"a step of {header.num_tokens} tokens with {header.num_parents} parents")
    return arrays


def passes(message: StepMessage, max_rows: int = MAX_LOGIT_ROWS) -> list[StepMessage]:
    """The same step with at most `max_rows` logit rows at a time.

    A second pass computes the step again, with the same keys and values. All ranks cut alike.
    """
    if header_of(message).num_logit_rows <= max_rows:
        return [message]
    arrays = unpack(message)
    rows, zero_blocks = arrays.logit_rows.tolist(), arrays.zero_blocks.tolist()
    copies = list(zip(arrays.copy_sources.tolist(), arrays.copy_targets.tolist(), strict=True))
    return [
        pack_step(
            lens=arrays.lens.tolist(),
            starts=arrays.starts.tolist(),
            block_counts=arrays.block_counts.tolist(),
            token_ids=arrays.token_ids.tolist(),
            blocks=arrays.blocks.tolist(),
            logit_rows=rows[cut : cut + max_rows],
            zero_blocks=zero_blocks if cut == 0 else (),
            copy_blocks=copies if cut == 0 else (),
            parents=arrays.parents.tolist(),
            lengths=arrays.lengths.tolist(),
        )
        for cut in range(0, len(rows), max_rows)
    ]
