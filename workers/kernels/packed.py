"""Linear layers over weights packed for the C++ kernels, each as one linear stream."""

from __future__ import annotations

import ctypes
from ctypes import c_long, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F

from workers.kernels.library import DTYPES, Library
from workers.kernels.memory import HugeMemory
from workers.kernels.order import Leaf, SumOrder, native_leaves, one_leaf

_TILE_INPUTS = 32  # of AMX


class WeightFormat(IntEnum):
    """As in cpu/linear.h."""

    BF16_PAIRS = 0  # columns in pairs of inputs, for AVX512-BF16 or AVX2
    INT8 = 1  # columns in fours of inputs, for vpdpbusd; see workers.kernels.quantized
    INT4 = 2
    BF16_TILES = 3  # columns in the tiles of AMX
    FLOATS = 4  # columns of float32
    INT8_TILES = 5  # columns in fours of inputs, in the tiles of AMX


class PackedWeights(ctypes.Structure):
    """As in cpu/linear.h."""

    _fields_ = [
        ("format", c_long),
        ("data", c_void_p),
        ("bias", c_void_p),
        ("columns", c_long),
        ("k", c_long),
        ("leaves", ctypes.POINTER(Leaf)),
        ("num_leaves", c_long),
        ("widths", ctypes.POINTER(c_long)),
        ("groups", c_long),
    ]


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A linear layer over packed weights, of float32 inputs for FLOATS, else bfloat16."""

    library: Library
    format: WeightFormat
    packed: torch.Tensor  # uint8, aligned
    bias: torch.Tensor | None  # (out,) float32
    in_features: int
    out_features: int
    out_dtype: torch.dtype
    leaves: ctypes.Array[Leaf]  # of the inputs
    num_nodes: int = 1
    widths: ctypes.Array[c_long] | None = None  # of quantized weights: the inputs of each group

    @property
    def in_dtype(self) -> torch.dtype:
        return torch.float32 if self.format is WeightFormat.FLOATS else torch.bfloat16

    def weights(self) -> PackedWeights:
        """For a C entry point; addresses, so valid while this layer lives."""
        return PackedWeights(
            format=self.format,
            data=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            columns=self.out_features,
            k=self.in_features,
            leaves=self.leaves,
            num_leaves=len(self.leaves),
            widths=self.widths,
            groups=0 if self.widths is None else len(self.widths),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), of a layer with one node."""
        assert self.num_nodes == 1, self.num_nodes
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=self.out_dtype)
        self._run(x, out)
        return out

    def nodes(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in) -> the sum under every node, (nodes, T, out)."""
        out = torch.empty((self.num_nodes, x.shape[0], self.out_features), dtype=self.out_dtype)
        self._run(x, out)
        return out

    def _run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.dtype == self.in_dtype and x.shape[-1] == self.in_features, (
            x.dtype,
            x.shape,
            self.in_features,
        )
        rows = dense_rows(x)
        if rows.shape[0]:
            weights = self.weights()
            self.library.linear(
                ctypes.addressof(weights),
                *(rows.data_ptr(), rows.stride(0) * rows.element_size(), rows.shape[0]),
                *(out.data_ptr(), self.out_dtype == torch.float32, torch.get_num_threads()),
            )


@dataclass(frozen=True, slots=True)
class PaddedLinear:
    """A linear layer of an odd number of bfloat16 inputs: to each row a zero is added, for the last pair."""

    linear: NativeLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.pad(x, (0, 1)))

    def nodes(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear.nodes(F.pad(x, (0, 1)))


def can_pack(library: Library, shape: torch.Size, dtype: torch.dtype, order: SumOrder | None = None) -> bool:
    """Whether this CPU and a weight (out, in) suit the packed form. Pairs of bfloat16 lie in one leaf."""
    out_features, in_features = shape
    inner_leaves = () if order is None else order.widths[:-1]
    return (
        library.has_linear
        and dtype in DTYPES
        and out_features > 0
        and in_features > 0
        and (dtype == torch.float32 or not any(width % 2 for width in inner_leaves))
    )


def pack(
    library: Library,
    memory: HugeMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    order: SumOrder | None = None,
) -> NativeLinear | PaddedLinear:
    """Lays weight (out, in) out in `memory`; out_dtype bfloat16 or float32. The weight itself is not kept.

    order: of its inputs; None: one leaf.
    """
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        if order is not None:
            order = SumOrder((*order.widths[:-1], order.widths[-1] + 1), order.joins, 1)
        padded = pack(library, memory, F.pad(weight, (0, 1)), bias, out_dtype, order)
        assert isinstance(padded, NativeLinear)
        return PaddedLinear(padded)
    out_features, in_features = weight.shape
    form = _format(library, weight.dtype, order)
    order = order or one_leaf(in_features)
    assert order.num_inputs == in_features, (order, weight.shape)
    packed = memory.take(library.packed_bytes(form, out_features, in_features))
    dense = weight.contiguous()
    library.pack(
        form, dense.data_ptr(), out_features, in_features, packed.data_ptr(), torch.get_num_threads()
    )
    return NativeLinear(
        library=library,
        format=form,
        packed=packed,
        bias=None if bias is None else bias.float().contiguous(),
        in_features=in_features,
        out_features=out_features,
        out_dtype=out_dtype,
        leaves=native_leaves(order),
        num_nodes=order.num_nodes,
    )


def _format(library: Library, dtype: torch.dtype, order: SumOrder | None) -> WeightFormat:
    """Every rank takes the same: tiles only where all leaves of the whole matrix consist of whole ones."""
    if dtype == torch.float32:
        return WeightFormat.FLOATS
    fits_tiles = order is None or order.grain % _TILE_INPUTS == 0
    return WeightFormat.BF16_TILES if library.can_use_tiles and fits_tiles else WeightFormat.BF16_PAIRS


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x as (rows, n) with a dense last axis, without a copy where it can be."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
