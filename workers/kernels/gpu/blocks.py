"""Blocks of a pool, or a part of each, to and from one dense run of bytes, which a transfer can send."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 1024  # words of a program
_WORDS = (torch.int64, torch.int32, torch.int16)


def gather_blocks(memory: torch.Tensor, blocks: torch.Tensor, offset: int, num_bytes: int) -> torch.Tensor:
    """(n, num_bytes): of each block in `blocks` (n,) int64 the bytes from `offset` on.

    memory: (num_blocks, block_bytes) uint8, contiguous. As `memory[blocks, offset : offset + num_bytes]`.
    """
    out = torch.empty((blocks.shape[0], num_bytes), dtype=torch.uint8, device=memory.device)
    _launch(memory, blocks, offset, out, is_gather=True)
    return out


def scatter_blocks(memory: torch.Tensor, blocks: torch.Tensor, offset: int, data: torch.Tensor) -> None:
    """Writes data (n, num_bytes) uint8 to where `gather_blocks` reads it. No block may be named twice."""
    _launch(memory, blocks, offset, data.contiguous(), is_gather=False)


def _launch(
    memory: torch.Tensor, blocks: torch.Tensor, offset: int, dense: torch.Tensor, *, is_gather: bool
) -> None:
    assert memory.is_contiguous() and memory.dtype == dense.dtype == torch.uint8, (memory.dtype, dense.dtype)
    assert dense.shape[0] == blocks.shape[0] and offset + dense.shape[1] <= memory.shape[1], (
        dense.shape,
        blocks.shape,
        offset,
    )
    if dense.numel() == 0:
        return
    # In the widest words that block, part and the start of the memory are whole numbers of.
    starts = memory.data_ptr() | dense.data_ptr()
    sizes = memory.shape[1] | dense.shape[1] | offset | starts
    word = next((each for each in _WORDS if sizes % each.itemsize == 0), torch.uint8)
    words = dense.shape[1] // word.itemsize
    _copy[(dense.shape[0], triton.cdiv(words, _WIDTH))](
        *(memory.view(word), blocks, dense.view(word), memory.shape[1] // word.itemsize),
        *(offset // word.itemsize, words),
        IS_GATHER=is_gather,
        WIDTH=_WIDTH,
        num_warps=4,
    )


@triton.jit
def _copy(memory, blocks, dense, block_words, offset, words, IS_GATHER: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_real = at < words
    inside = memory + tl.load(blocks + row) * block_words + offset + at
    outside = dense + row * words + at
    if IS_GATHER:
        tl.store(outside, tl.load(inside, mask=is_real), mask=is_real)
    else:
        tl.store(inside, tl.load(outside, mask=is_real), mask=is_real)
