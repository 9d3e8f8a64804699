"""Weights in 8 or 4 bits: how a matrix is quantized, and what its values are then.

- INT8: one float32 scale an output; code = round(weight / scale), -127..127.
- INT4: every group of 32 inputs of an output has a scale and a minimum in half precision, code 0..15;
  weight = scale * code + minimum. This is the form of GGUF's Q4_1 (llama.cpp), five bits a weight: a matrix
  that came from it gets the codes back that it had.

Rounding is to nearest, half to even. Every kernel set computes with these same values; the packed products of
`workers.kernels.packed_quantized` round their inputs to 8 or 16 bits too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from workers.weight_forms import GROUP, Quantization

_CHUNK = 1 << 15  # elements quantized at once: they stay in the second-level cache, and on one thread


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix (out, in) in one of the two forms, or some inputs of one with the codes of the whole."""

    codes: torch.Tensor  # (out, in): int8 for INT8, uint8 for INT4
    scales: torch.Tensor  # (out,) float32, or (out, groups of in) float16
    minima: torch.Tensor | None  # (out, groups of in) float16, of INT4 only
    offset: int = 0  # inputs of the first group that the part lacks, of INT4 only

    @property
    def quantization(self) -> Quantization:
        return Quantization.INT8 if self.minima is None else Quantization.INT4

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same there."""
        minima = None if self.minima is None else self.minima.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), minima=minima)

    def part(self, inputs: range) -> QuantizedWeight:
        """Some of the inputs of a whole matrix."""
        assert self.offset == 0, "a part of a part"
        codes = self.codes[:, inputs.start : inputs.stop]
        if self.minima is None:
            return replace(self, codes=codes)
        groups = slice(inputs.start // GROUP, -(-inputs.stop // GROUP))
        return QuantizedWeight(
            codes=codes,
            scales=self.scales[:, groups],
            minima=self.minima[:, groups],
            offset=inputs.start % GROUP,
        )

    def values(self) -> torch.Tensor:
        """The weights that the codes stand for: (out, in) float32."""
        if self.minima is None:
            return self.codes.float() * self.scales[:, None]
        out_features, in_features = self.codes.shape
        end = self.offset + in_features
        groups = F.pad(self.codes, (self.offset, -end % GROUP)).view(out_features, -1, GROUP)
        values = groups * self.scales.float()[..., None] + self.minima.float()[..., None]
        return values.flatten(1)[:, self.offset : end]


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Matrices of one form with equal inputs, one below the other."""
    minima = [part.minima for part in parts if part.minima is not None]
    assert len(minima) in (0, len(parts)), "parts of different forms"
    assert len({part.offset for part in parts}) == 1, "parts of different inputs"
    return QuantizedWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        minima=torch.cat(minima) if minima else None,
        offset=parts[0].offset,
    )


def quantize(
    weight: torch.Tensor, quantization: Quantization, inputs: range | None = None
) -> QuantizedWeight:
    """Quantizes weight (out, in), any float dtype, all finite, on its own device; or the part `inputs` of it,
    with the codes of the whole.

    Raises ValueError where INT4 cannot hold it: a weight beyond the range of half precision.
    """
    assert quantization in _QUANTIZERS, f"nothing to quantize to: {quantization}"
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    inputs = range(weight.shape[1]) if inputs is None else inputs
    return stack([_QUANTIZERS[quantization](part.float(), inputs) for part in torch.split(weight, rows)])


def _int8(weight: torch.Tensor, inputs: range) -> QuantizedWeight:
    largest = weight.abs().amax(dim=1, keepdim=True)
    # A row of zeros gets a scale too, so that nothing is divided by zero.
    scales = largest.clamp(min=torch.finfo(torch.float32).tiny) / 127
    codes = (weight[:, inputs.start : inputs.stop] / scales).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(codes=codes, scales=scales[:, 0], minima=None)


def _int4(weight: torch.Tensor, inputs: range) -> QuantizedWeight:
    first = inputs.start // GROUP * GROUP
    weight = weight[:, first : -(-inputs.stop // GROUP) * GROUP]  # whole groups, as far as there are inputs
    out_features, in_features = weight.shape
    padding = -in_features % GROUP
    if padding:  # by the last weight: it widens no group
        weight = torch.cat((weight, weight[:, -1:].expand(-1, padding)), dim=1)
    groups = weight.view(out_features, -1, GROUP)
    least, most = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    minima, scales = least.half(), ((most - least) / 15).half()
    if not bool(minima.isfinite().all() and scales.isfinite().all()):
        raise ValueError(
            f"weights from {float(least.min()):.3g} to {float(most.max()):.3g} are beyond what int4 holds "
            "in half precision; use int8"
        )
    # Where all weights of a group are equal any step will do: the codes are 0.
    steps = torch.where(scales == 0, 1.0, scales.float())
    codes = ((groups - minima.float()) / steps).round_().clamp_(0, 15).to(torch.int8).view(torch.uint8)
    return QuantizedWeight(
        codes=codes.flatten(1)[:, inputs.start - first : inputs.stop - first],
        scales=scales[..., 0],
        minima=minima[..., 0],
        offset=inputs.start - first,
    )


_QUANTIZERS = {Quantization.INT8: _int8, Quantization.INT4: _int4}
