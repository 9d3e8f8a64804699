"""Pieces of huge-page memory: where they lie, and that they live as long as they are held."""

from __future__ import annotations

import gc

import pytest
import torch

from workers.kernels.memory import ALIGNMENT, CHUNK_BYTES, HUGE_PAGE_BYTES, HugeMemory, huge_bytes


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1])
def test_a_block_starts_at_a_huge_page_and_is_zero(num_bytes: int) -> None:
    block = huge_bytes(num_bytes)
    assert block.shape == (num_bytes,) and block.dtype == torch.uint8
    assert num_bytes == 0 or block.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not block.any()
    block.fill_(1)


def test_pieces_lie_behind_each_other_and_never_overlap() -> None:
    memory = HugeMemory()
    pieces = [memory.take(size) for size in (100, 64, 1, CHUNK_BYTES, 7)]
    first = pieces[0].data_ptr()
    assert [piece.data_ptr() - first for piece in pieces[:3]] == [0, 128, 192]
    assert all(piece.data_ptr() % ALIGNMENT == 0 for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))


def test_a_piece_outlives_its_memory() -> None:
    piece = HugeMemory().take(1000)
    piece.fill_(5)
    gc.collect()
    assert int(piece.sum()) == 5000
