"""The part of a matrix that a rank holds, out of files with few bits. Only that part is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.kernels import QuantizedWeight
from workers.kernels.quantized import GROUP
from workers.model.errors import CheckpointError
from workers.model.formats.grid import GridWeight
from workers.model.formats.layouts import AwqLayout, Entries, Fp8Layout, GptqLayout, Layout, TandemLayout
from workers.model.formats.packed_codes import (
    AWQ_NIBBLES,
    inside,
    touching,
    unpack_columns,
    unpack_nibbles,
    unpack_rows,
)

# Of a tensor by name: all of it, some rows, or some columns of some rows.
Read = Callable[[str, range | None, range | None], torch.Tensor]


class StoredWeight(Protocol):
    """A part of a matrix as the files have it."""

    def values(self) -> torch.Tensor:
        """(outputs, inputs) float32: what the file says, without another rounding."""
        ...

    def kept(self) -> QuantizedWeight | None:
        """The same in a form of the kernels; None where none of them holds it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a matrix."""

    outputs: range
    inputs: range


def read_part(layout: Layout, stem: str, span: Span, read: Read, entries: Entries) -> StoredWeight:
    """Raises CheckpointError for groups that are not there."""
    match layout:
        case GptqLayout():
            return _gptq(layout, stem, span, read, entries)
        case AwqLayout():
            return _awq(layout, stem, span, read)
        case Fp8Layout():
            return _fp8(layout, stem, span, read, entries)
        case TandemLayout():
            return _tandem(stem, span, read, entries)
    raise AssertionError(f"no reader for {layout}")


def _gptq(layout: GptqLayout, stem: str, span: Span, read: Read, entries: Entries) -> GridWeight:
    per, outputs, inputs = layout.per, span.outputs, span.inputs
    num_groups = entries[f"{stem}.scales"].shape[0]
    if f"{stem}.g_idx" in entries:
        group_of = read(f"{stem}.g_idx", inputs, None).long()
        if group_of.numel() and not 0 <= int(group_of.min()) <= int(group_of.max()) < num_groups:
            raise CheckpointError(f"{stem}.g_idx names groups outside of 0 to {num_groups - 1}")
    else:
        group_of = _even_groups(inputs, layout.group_size)
    rows, columns = touching(inputs, per), touching(outputs, per)
    packed = read(f"{stem}.qweight", rows, outputs)
    codes = unpack_rows(packed, layout.bits)[inside(inputs, per)]
    groups, group_of = _used(group_of)
    stored = read(f"{stem}.qzeros", groups, columns)
    zeros = unpack_columns(stored, layout.bits)[:, inside(outputs, per)]
    zeros = (zeros.to(torch.int16) + layout.zero_offset & ((1 << layout.bits) - 1)).to(torch.uint8)
    scales = read(f"{stem}.scales", groups, outputs)
    return _grid(codes, scales, zeros, group_of, layout.bits)


def _awq(layout: AwqLayout, stem: str, span: Span, read: Read) -> GridWeight:
    outputs, inputs = span.outputs, span.inputs
    columns, mine = touching(outputs, layout.per), inside(outputs, layout.per)
    groups, group_of = _used(_even_groups(inputs, layout.group_size))
    packed = read(f"{stem}.qweight", inputs, columns)
    stored = read(f"{stem}.qzeros", groups, columns)
    scales = read(f"{stem}.scales", groups, outputs)
    codes, zeros = (unpack_columns(part, 4, AWQ_NIBBLES)[:, mine] for part in (packed, stored))
    return _grid(codes, scales, zeros, group_of, 4)


def _grid(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_of: torch.Tensor, bits: int
) -> GridWeight:
    """All given as (inputs or groups, outputs), as the files have them."""
    return GridWeight(
        codes=codes.T.contiguous(),
        scales=scales.T.contiguous(),
        zeros=zeros.T.contiguous(),
        group_of=group_of,
        bits=bits,
    )


def _even_groups(inputs: range, group_size: int | None) -> torch.Tensor:
    at = torch.arange(inputs.start, inputs.stop)
    return at * 0 if group_size is None else at // group_size


def _used(group_of: torch.Tensor) -> tuple[range, torch.Tensor]:
    """(the groups that have any of the inputs, the group of each input counted from the first of them)."""
    if not group_of.numel():
        return range(0), group_of
    first, last = int(group_of.min()), int(group_of.max())
    return range(first, last + 1), group_of - first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled:
    """Floats of 8 bits."""

    floats: torch.Tensor  # (out, in)
    scales: torch.Tensor  # what they are multiplied by, float32, of a shape that fits

    def values(self) -> torch.Tensor:
        return self.floats.float().mul_(self.scales)

    def kept(self) -> QuantizedWeight | None:
        return None


def _fp8(layout: Fp8Layout, stem: str, span: Span, read: Read, entries: Entries) -> _Scaled:
    outputs, inputs = span.outputs, span.inputs
    name = layout.scale_name(stem, entries)
    floats = read(f"{stem}.weight", outputs, inputs)
    shape = entries[name].shape
    scales: torch.Tensor = read(name, None, None).float()
    if layout.block is not None:
        rows = torch.arange(outputs.start, outputs.stop) // layout.block[0]
        columns = torch.arange(inputs.start, inputs.stop) // layout.block[1]
        scales = scales[rows][:, columns]
    elif scales.numel() == 1 and shape[:1] != (entries[f"{stem}.weight"].shape[0],):
        scales = scales.reshape(1, 1)
    else:
        scales = scales.reshape(-1, 1)[outputs.start : outputs.stop]
    return _Scaled(floats=floats, scales=scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Int8:
    """A weight in the kernels' INT8."""

    weight: QuantizedWeight

    def values(self) -> torch.Tensor:
        return self.weight.values()

    def kept(self) -> QuantizedWeight | None:
        return self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class _Int4:
    """A part of a weight in the kernels' INT4; groups are counted from the first input of the matrix."""

    codes: torch.Tensor  # (out, in) uint8
    scales: torch.Tensor  # (out, groups that the inputs touch) float16
    minima: torch.Tensor
    inputs: range

    def values(self) -> torch.Tensor:
        group_of = torch.arange(self.inputs.start, self.inputs.stop) // GROUP - self.inputs.start // GROUP
        scales, minima = self.scales.float()[:, group_of], self.minima.float()[:, group_of]
        return self.codes.float().mul_(scales).add_(minima)

    def kept(self) -> QuantizedWeight | None:
        if self.inputs.start % GROUP:
            return None
        return QuantizedWeight(codes=self.codes, scales=self.scales, minima=self.minima)


def _tandem(stem: str, span: Span, read: Read, entries: Entries) -> StoredWeight:
    outputs, inputs = span.outputs, span.inputs
    if f"{stem}.minima" not in entries:
        codes, scales = read(f"{stem}.codes", outputs, inputs), read(f"{stem}.scales", outputs, None)
        return _Int8(weight=QuantizedWeight(codes=codes, scales=scales, minima=None))
    packed = read(f"{stem}.codes", outputs, touching(inputs, 2))
    groups = touching(inputs, GROUP)
    return _Int4(
        codes=unpack_nibbles(packed)[:, inside(inputs, 2)].contiguous(),
        scales=read(f"{stem}.scales", outputs, groups),
        minima=read(f"{stem}.minima", outputs, groups),
        inputs=inputs,
    )
