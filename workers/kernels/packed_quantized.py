"""Packing of quantized weights for vpdpbusd and for the tiles of AMX.

Rows enter the products of such a layer as integers with a scale for every group of inputs, for every batch
size: for vpdpbusd of 8 bits in groups of at most 32 (cpu/quant_rows.h), for tiles of 16 bits in groups as
long as leaves, but for very long ones (cpu/gemm_int8_tiles.h). A group ends where a leaf of the order does
and where the inputs do that share a scale of the weights: so it is the same one on every rank that may have
it. All are filled up to multiples of 32 inputs with zeros, which costs nothing where the leaves are such.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_long

import torch
import torch.nn.functional as F

from workers.kernels.library import Library
from workers.kernels.memory import HugeMemory
from workers.kernels.order import SumOrder, native_leaves, one_leaf
from workers.kernels.packed import NativeLinear, WeightFormat, can_pack
from workers.kernels.quantized import QuantizedWeight
from workers.weight_forms import GROUP, Quantization

_FORMATS = {Quantization.INT8: WeightFormat.INT8, Quantization.INT4: WeightFormat.INT4}
_TILE_GROUP = 2048  # the most inputs that share a scale of a row: long rows have outliers


def can_pack_quantized(library: Library, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether this CPU and a weight (out, in) for inputs of `dtype` suit the packed forms."""
    return library.has_quantized and dtype == torch.bfloat16 and can_pack(library, shape, dtype)


def quantized_format(library: Library, quantization: Quantization) -> WeightFormat:
    """The same on every rank whose CPU is of the same kind."""
    if quantization is Quantization.INT8 and library.can_use_tiles:
        return WeightFormat.INT8_TILES
    return _FORMATS[quantization]


def pack_quantized(
    library: Library,
    memory: HugeMemory,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    order: SumOrder | None = None,
) -> NativeLinear:
    """Lays the codes out in `memory`; out_dtype bfloat16 or float32. They are not kept.

    order: of its inputs; None: one leaf.
    """
    out_features, in_features = weight.codes.shape
    order = order or one_leaf(in_features)
    assert order.num_inputs == in_features, (order, weight.codes.shape)
    form = quantized_format(library, weight.quantization)
    most = _TILE_GROUP if form is WeightFormat.INT8_TILES else GROUP
    leaves = [list(_groups(leaf, weight, most)) for leaf in order.spans]
    groups = [group for leaf in leaves for group in leaf]
    filled = SumOrder(tuple(sum(map(_filled_width, leaf)) for leaf in leaves), order.joins, GROUP)
    pieces = filled.num_inputs // GROUP
    packed = memory.take(library.quantized_bytes(form, out_features, pieces))
    codes, scales, minima = _filled(weight.codes, groups), weight.scales, weight.minima
    if minima is not None:
        shared = torch.tensor([(weight.offset + group.start) // GROUP for group in groups])
        scales, minima = scales[:, shared].contiguous(), minima[:, shared].contiguous()
    scales = scales.contiguous()
    library.pack_quantized(
        *(form, codes.data_ptr(), scales.data_ptr(), None if minima is None else minima.data_ptr()),
        *(out_features, pieces, packed.data_ptr(), torch.get_num_threads()),
    )
    return NativeLinear(
        library=library,
        format=form,
        packed=packed,
        bias=None if bias is None else bias.float().contiguous(),
        in_features=in_features,
        out_features=out_features,
        out_dtype=out_dtype,
        leaves=native_leaves(filled),
        num_nodes=order.num_nodes,
        widths=(c_long * len(groups))(*map(len, groups)),
    )


def _groups(leaf: range, weight: QuantizedWeight, most: int) -> Iterator[range]:
    """The inputs of each group of a leaf: `most`, fewer at borders."""
    at = leaf.start
    while at < leaf.stop:
        before = 0 if weight.minima is None else (weight.offset + at) % GROUP
        end = min(at + most - before, leaf.stop)
        yield range(at, end)
        at = end


def _filled_width(group: range) -> int:
    return -(-len(group) // GROUP) * GROUP


def _filled(codes: torch.Tensor, groups: list[range]) -> torch.Tensor:
    """codes (out, in) -> (out, filled in), zeros behind the inputs of each group."""
    in_features = codes.shape[1]
    if all(len(group) % GROUP == 0 for group in groups[:-1]):
        return F.pad(codes, (0, -in_features % GROUP)).contiguous()
    places = [
        i if i in group else in_features
        for group in groups
        for i in range(group.start, group.start + _filled_width(group))
    ]
    return F.pad(codes, (0, 1))[:, torch.tensor(places)]
