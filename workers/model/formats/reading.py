"""The part of a matrix that a rank holds, out of files with few bits. Only that part is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.kernels import QuantizedWeight
from workers.model.errors import CheckpointError
from workers.model.formats.grid import GridWeight, can_keep
from workers.model.formats.layouts import AwqLayout, Entries, Fp8Layout, GptqLayout, Layout, TandemLayout
from workers.model.formats.packed_codes import (
    AWQ_NIBBLES,
    inside,
    touching,
    unpack_columns,
    unpack_nibbles,
    unpack_rows,
)
from workers.weight_forms import GROUP

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
    num_inputs: int  # of the matrix


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
        all_groups = read(f"{stem}.g_idx", None, None).long()
        if all_groups.numel() and not 0 <= int(all_groups.min()) <= int(all_groups.max()) < num_groups:
            raise CheckpointError(f"{stem}.g_idx names groups outside of 0 to {num_groups - 1}")
    else:
        all_groups = _even_groups(range(span.num_inputs), layout.group_size)
    is_kept = can_keep(read(f"{stem}.scales", None, None), all_groups, layout.bits)
    rows, columns = touching(inputs, per), touching(outputs, per)
    packed = read(f"{stem}.qweight", rows, outputs)
    codes = unpack_rows(packed, layout.bits)[inside(inputs, per)]
    groups, group_of = _used(all_groups[inputs.start : inputs.stop])
    stored = read(f"{stem}.qzeros", groups, columns)
    zeros = unpack_columns(stored, layout.bits)[:, inside(outputs, per)]
    zeros = (zeros.to(torch.int16) + layout.zero_offset & ((1 << layout.bits) - 1)).to(torch.uint8)
    scales = read(f"{stem}.scales", groups, outputs)
    return _grid(codes, scales, zeros, group_of, inputs.start, is_kept)


def _awq(layout: AwqLayout, stem: str, span: Span, read: Read) -> GridWeight:
    outputs, inputs = span.outputs, span.inputs
    columns, mine = touching(outputs, layout.per), inside(outputs, layout.per)
    all_groups = _even_groups(range(span.num_inputs), layout.group_size)
    is_kept = can_keep(read(f"{stem}.scales", None, None), all_groups, 4)
    groups, group_of = _used(all_groups[inputs.start : inputs.stop])
    packed = read(f"{stem}.qweight", inputs, columns)
    stored = read(f"{stem}.qzeros", groups, columns)
    scales = read(f"{stem}.scales", groups, outputs)
    codes, zeros = (unpack_columns(part, 4, AWQ_NIBBLES)[:, mine] for part in (packed, stored))
    return _grid(codes, scales, zeros, group_of, inputs.start, is_kept)


def _grid(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_of: torch.Tensor,
    first_input: int,
    is_kept: bool,
) -> GridWeight:
    """Codes, scales and zeros as (inputs or groups, outputs), as the files have them."""
    return GridWeight(
        codes=codes.T.contiguous(),
        scales=scales.T.contiguous(),
        zeros=zeros.T.contiguous(),
        group_of=group_of,
        first_input=first_input,
        can_keep=is_kept,
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
class _Coded:
    """A weight in one of the kernels' forms."""

    weight: QuantizedWeight

    def values(self) -> torch.Tensor:
        return self.weight.values()

    def kept(self) -> QuantizedWeight | None:
        return self.weight


def _tandem(stem: str, span: Span, read: Read, entries: Entries) -> StoredWeight:
    outputs, inputs = span.outputs, span.inputs
    if f"{stem}.minima" not in entries:
        codes, scales = read(f"{stem}.codes", outputs, inputs), read(f"{stem}.scales", outputs, None)
        return _Coded(weight=QuantizedWeight(codes=codes, scales=scales, minima=None))
    packed = read(f"{stem}.codes", outputs, touching(inputs, 2))
    groups = touching(inputs, GROUP)
    weight = QuantizedWeight(
        codes=unpack_nibbles(packed)[:, inside(inputs, 2)].contiguous(),
        scales=read(f"{stem}.scales", outputs, groups),
        minima=read(f"{stem}.minima", outputs, groups),
        offset=inputs.start % GROUP,
    )
    return _Coded(weight=weight)
