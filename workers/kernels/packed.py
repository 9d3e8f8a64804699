"""Linear layers over weights packed for the C++ kernels, each as one linear stream."""

from __future__ import annotations

import ctypes
from ctypes import c_long, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch

from workers.kernels.library import Library
from workers.kernels.memory import HugeMemory


class WeightFormat(IntEnum):
    """As in cpu/linear.h."""

    BF16_PAIRS = 0  # columns in pairs of inputs, for AVX512-BF16 or AVX2
    INT8 = 1  # columns in fours of inputs, for vpdpbusd; see workers.kernels.quantized
    INT4 = 2
    BF16_TILES = 3  # columns in the tiles of AMX


class PackedWeights(ctypes.Structure):
    """As in cpu/linear.h."""

    _fields_ = [
        ("format", c_long),
        ("data", c_void_p),
        ("bias", c_void_p),
        ("columns", c_long),
        ("k", c_long),
    ]


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A linear layer of bfloat16 inputs over packed weights."""

    library: Library
    format: WeightFormat
    packed: torch.Tensor  # uint8, aligned
    bias: torch.Tensor | None  # (out,) float32
    in_features: int
    out_features: int
    out_dtype: torch.dtype

    def weights(self) -> PackedWeights:
        """For a C entry point; addresses, so valid while this layer lives."""
        return PackedWeights(
            format=self.format,
            data=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            columns=self.out_features,
            k=self.in_features,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16 and x.shape[-1] == self.in_features, (
            x.dtype,
            x.shape,
            self.in_features,
        )
        rows = dense_rows(x)
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=self.out_dtype)
        if rows.shape[0]:
            weights = self.weights()
            self.library.linear(
                ctypes.addressof(weights),
                *(rows.data_ptr(), rows.stride(0), rows.shape[0]),
                *(out.data_ptr(), self.out_dtype == torch.float32, torch.get_num_threads()),
            )
        return out


def can_pack(library: Library, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether this CPU and a weight (out, in) suit the packed form: products take inputs in pairs."""
    out_features, in_features = shape
    return (
        library.has_linear
        and dtype == torch.bfloat16
        and out_features > 0
        and in_features > 0
        and in_features % 2 == 0
    )


def pack(
    library: Library,
    memory: HugeMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> NativeLinear:
    """Lays weight (out, in) out in `memory`; out_dtype bfloat16 or float32. The weight itself is not kept."""
    out_features, in_features = weight.shape
    form = WeightFormat.BF16_TILES if library.can_use_tiles else WeightFormat.BF16_PAIRS
    packed = memory.take(library.packed_bytes(form, out_features, in_features))
    dense = weight.contiguous()
    library.pack(
        form, dense.data_ptr(), out_features, in_features, packed.data_ptr(), torch.get_num_threads()
    )
    wide_bias = None if bias is None else bias.float().contiguous()
    return NativeLinear(library, form, packed, wide_bias, in_features, out_features, out_dtype)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x as (rows, n) with a dense last axis, without a copy where it can be."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
