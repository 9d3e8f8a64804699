"""The paged KV pool of one rank as kernels see it: keys and values as the model computes them, or as int8.

A block has a page for every (KV head, layer, K or V), heads outermost: a range of heads over all layers is
one contiguous run. A page has a row of head_dim numbers for each of its block_size tokens. An int8 page has
the codes of all its rows, then their scales, a float16 each: value = code * scale.

A row's codes depend on its own numbers alone: the same token has the same bytes however its prompt was cut,
and wherever they were copied to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.kv_format import check_pages, row_bytes

MAX_CODE = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheForm:
    """What decides the bytes of a block of one rank."""

    num_kv_heads: int  # of the rank
    num_layers: int
    block_size: int  # tokens
    head_dim: int
    dtype: torch.dtype  # of the model, or int8

    def __post_init__(self) -> None:
        """Raises ValueError for int8 pages whose scales would lie at odd addresses."""
        check_pages(self.head_dim, self.block_size, self.name)

    @property
    def name(self) -> str:
        """Of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def page_bytes(self) -> int:
        return self.block_size * row_bytes(self.head_dim, self.name)

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.num_layers * 2 * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer: views of the pool. Both are of one dtype and lie alike."""

    keys: torch.Tensor  # (num_blocks, kv_heads, block_size, head_dim), dense last two axes; int8: codes
    values: torch.Tensor
    key_scales: torch.Tensor | None = None  # (num_blocks, kv_heads, block_size) float16, behind the codes
    value_scales: torch.Tensor | None = None  # with int8 both, else neither

    @property
    def is_quantized(self) -> bool:
        return self.key_scales is not None

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of keys and of values; None where they are not int8."""
        if self.key_scales is None or self.value_scales is None:
            return None
        return self.key_scales, self.value_scales

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]


class PagedCache:
    """All blocks of a rank. Holds the memory it is given, copies nothing."""

    def __init__(self, memory: torch.Tensor, form: CacheForm) -> None:
        """memory: (num_blocks, block_bytes) uint8, contiguous. Raises ValueError for another size."""
        if memory.dim() != 2 or memory.shape[1] != form.block_bytes or not memory.is_contiguous():
            raise ValueError(f"memory {tuple(memory.shape)} for blocks of {form.block_bytes} bytes")
        self.memory = memory
        self.form = form
        # As attributes: a step that asks torch for them waits for memory.
        self.num_blocks: int = memory.shape[0]
        self.block_size = form.block_size
        shape = (memory.shape[0], form.num_kv_heads, form.num_layers, 2)
        pages = memory.view(*shape, form.page_bytes)
        num_bytes = form.block_size * form.head_dim * form.dtype.itemsize
        # Both (num_blocks, kv_heads, layers, 2, block_size), the numbers with head_dim behind it.
        self.numbers = pages[..., :num_bytes].view(form.dtype).view(*shape, form.block_size, form.head_dim)
        self.scales = pages[..., num_bytes:].view(torch.float16) if form.dtype == torch.int8 else None
        self.layers = tuple(self._layer(index) for index in range(form.num_layers))
        self._host_rows = self._rows_on_host() if memory.device.type == "cpu" else None

    @staticmethod
    def zeros(num_blocks: int, form: CacheForm) -> PagedCache:
        """In new memory of the host."""
        return PagedCache(torch.zeros(num_blocks, form.block_bytes, dtype=torch.uint8), form)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def clone(self, device: torch.device | None = None) -> PagedCache:
        """With memory of its own, on another device where one is named."""
        return PagedCache(self.memory.to(device or self.device, copy=True), self.form)

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies keys and values of the slots (block * block_size + offset) `sources`, all at once, to
        `targets`: of all heads and layers.

        On the host slot by slot, and not by torch, which takes long to be asked: there are few, and an index
        of all of them makes threads of torch's own, which wait behind those of the kernels.
        """
        if self._host_rows is None:  # two kernels, instead of two launches a slot
            self._move_at_once(sources, targets)
            return
        there, here = ([divmod(slot, self.block_size) for slot in slots] for slots in (sources, targets))
        for rows in self._host_rows:
            moved = [rows[block, :, :, :, offset].copy() for block, offset in there]
            for (block, offset), row in zip(here, moved, strict=True):
                rows[block, :, :, :, offset] = row

    def _move_at_once(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        every, size = slice(None), self.block_size
        there, here = (torch.tensor(slots, device=self.device) for slots in (sources, targets))
        for rows in (self.numbers, self.scales):
            if rows is not None:
                moved = rows[there // size, every, every, every, there % size]
                rows[here // size, every, every, every, here % size] = moved

    def _rows_on_host(self) -> list[npt.NDArray[np.uint8]]:
        """Numbers, and scales where there are any:
        (num_blocks, kv_heads, layers, 2, block_size, bytes of a row)."""
        rows = [self.numbers] if self.scales is None else [self.numbers, self.scales[..., None]]
        return [each.view(torch.uint8).numpy() for each in rows]

    def _layer(self, index: int) -> LayerCache:
        numbers = self.numbers[:, :, index]
        if self.scales is None:
            return LayerCache(keys=numbers[:, :, 0], values=numbers[:, :, 1])
        scales = self.scales[:, :, index]
        return LayerCache(
            keys=numbers[:, :, 0],
            values=numbers[:, :, 1],
            key_scales=scales[:, :, 0],
            value_scales=scales[:, :, 1],
        )


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., d) as codes (..., d) int8 and scales (...) float16, with codes * scales next to x.

    A scale is max|x| / 127, rounded up, so that no code is beyond 127; codes are rounded half to even. Zeros
    have the scale 0. Where a number is not finite, or beyond 127 * 65504, the scale is NaN: that shows in
    whatever is computed from the row.
    """
    wide = x.float()
    wanted = wide.abs().amax(-1) / MAX_CODE
    scales = wanted.half()
    up = (scales.float() < wanted).to(torch.int16)  # patterns of numbers that are not negative ascend
    scales = (scales.view(torch.int16) + up).view(torch.float16)
    scales = scales.masked_fill(~scales.isfinite(), math.nan)
    steps = scales.float()[..., None]
    codes = torch.where(steps > 0, wide / steps, 0.0).round()
    return codes.to(torch.int8), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(..., d) float32."""
    return codes.float() * scales.float()[..., None]
