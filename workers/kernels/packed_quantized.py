"""Packing of quantized weights for vpdpbusd.

Rows enter the products of such a layer as 8-bit integers with a scale for every group of 32 inputs (as
cpu/quant_rows.h says), for every batch size. A layer that holds a part of the inputs of a matrix counts its
groups from its own first one.
"""

from __future__ import annotations

import torch

from workers.kernels.library import Library
from workers.kernels.memory import HugeMemory
from workers.kernels.order import native_leaves, one_leaf
from workers.kernels.packed import NativeLinear, WeightFormat, can_pack
from workers.kernels.quantized import Quantization, QuantizedWeight

FORMATS = {Quantization.INT8: WeightFormat.INT8, Quantization.INT4: WeightFormat.INT4}


def can_pack_quantized(library: Library, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether this CPU and a weight (out, in) for inputs of `dtype` suit the packed forms."""
    is_in_pairs = dtype == torch.bfloat16 and shape[1] % 2 == 0
    return library.has_quantized and is_in_pairs and can_pack(library, shape, dtype)


def pack_quantized(
    library: Library,
    memory: HugeMemory,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> NativeLinear:
    """Lays the codes out in `memory`; out_dtype bfloat16 or float32. They are not kept."""
    out_features, in_features = weight.codes.shape
    form = FORMATS[weight.quantization]
    packed = memory.take(library.quantized_bytes(form, out_features, in_features))
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    minima = None if weight.minima is None else weight.minima.contiguous()
    library.pack_quantized(
        *(form, codes.data_ptr(), scales.data_ptr(), None if minima is None else minima.data_ptr()),
        *(out_features, in_features, packed.data_ptr(), torch.get_num_threads()),
    )
    wide_bias = None if bias is None else bias.float().contiguous()
    return NativeLinear(
        library=library,
        format=form,
        packed=packed,
        bias=wide_bias,
        in_features=in_features,
        out_features=out_features,
        out_dtype=out_dtype,
        leaves=native_leaves(one_leaf(in_features)),
    )
