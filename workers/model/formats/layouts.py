"""How a linear weight of few bits lies in the files of a checkpoint: names, shapes and dtypes of its parts.

A matrix called `stem` (outputs, inputs), which a plain checkpoint has as `stem.weight`, is in its place:

- GPTQ (Frantar et al. 2022), as AutoGPTQ writes it: `qweight` int32 (inputs / per, outputs), per = 32 / bits
  codes in an integer, the first in its lowest bits; `scales` (groups, outputs); `qzeros` int32 (groups,
  outputs / per); `g_idx` int32 (inputs), the group of each input. weight = scale * (code - zero). Its first
  version stores zero - 1 (modulo 2^bits), `gptq_v2` the zero itself.
- AWQ (Lin et al. 2023), version `gemm`: `qweight` int32 (inputs, outputs / 8), `qzeros` int32 (groups,
  outputs / 8), `scales` (groups, outputs). The nibbles of an integer, from the lowest, are outputs
  0, 2, 4, 6, 1, 3, 5, 7 of its eight.
- fp8: `weight` float8 (outputs, inputs) of e4m3, and its scale: one, one an output, or one a block, as
  `weight_scale` or `weight_scale_inv`. weight = value * scale, whichever of the two names it has.
- tandem: `codes`, `scales` and, of 4 bits, `minima`, as `workers.kernels.quantized` defines them; the codes
  of two neighbouring inputs share a byte, the first in its lower half.

A matrix that has a plain `weight` is read as in any checkpoint. No torch here: the reading is in
`workers.model.formats.reading`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from workers.model.safetensors_header import TensorEntry
from workers.weight_forms import GROUP, Quantization, WeightForms

FP8 = "F8_E4M3"
_SCALES = ("F16", "BF16", "F32")
_FP8_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_AWQ_PER = 8  # codes in an integer
_CODES_OF_4_BITS = WeightForms(Quantization.INT4, Quantization.INT4)

Entries = Mapping[str, TensorEntry]


class Part(NamedTuple):
    """A tensor of a matrix: what it may look like. `is_needed`: the matrix cannot be read without it."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_needed: bool = True


class Layout(Protocol):
    """One of the forms above."""

    @property
    def kept(self) -> WeightForms | None:
        """What holds matrices in this form, of the layers and a head, without another rounding; None: no form
        of few bits."""
        ...

    def has(self, stem: str, entries: Entries) -> bool:
        """Whether the files hold the matrix in this form."""
        ...

    def parts(self, stem: str, outputs: int, inputs: int, entries: Entries) -> dict[str, Part]:
        """By their names in the files."""
        ...

    def is_ignored(self, name: str) -> bool:
        """A tensor that belongs to the form but says nothing about weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqLayout:
    """AutoGPTQ's files."""

    bits: int  # 4 or 8
    group_size: int | None  # inputs; None: all of them
    has_order: bool  # inputs were grouped by their activations, so g_idx is needed
    zero_offset: int  # added to a stored zero

    @property
    def kept(self) -> WeightForms | None:
        return _CODES_OF_4_BITS if self.bits == 4 else None

    @property
    def per(self) -> int:
        """Codes in an integer."""
        return 32 // self.bits

    def num_groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def has(self, stem: str, entries: Entries) -> bool:
        return f"{stem}.qweight" in entries

    def parts(self, stem: str, outputs: int, inputs: int, entries: Entries) -> dict[str, Part]:
        groups, per = self.num_groups(inputs), self.per
        return {
            f"{stem}.qweight": Part(((-(-inputs // per), outputs),), ("I32",)),
            f"{stem}.qzeros": Part(((groups, -(-outputs // per)),), ("I32",)),
            f"{stem}.scales": Part(((groups, outputs),), _SCALES),
            f"{stem}.g_idx": Part(((inputs,),), ("I32",), is_needed=self.has_order),
        }

    def is_ignored(self, name: str) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqLayout:
    """AutoAWQ's files, version gemm."""

    group_size: int | None

    @property
    def kept(self) -> WeightForms | None:
        return _CODES_OF_4_BITS

    @property
    def per(self) -> int:
        return _AWQ_PER

    def num_groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def has(self, stem: str, entries: Entries) -> bool:
        return f"{stem}.qweight" in entries

    def parts(self, stem: str, outputs: int, inputs: int, entries: Entries) -> dict[str, Part]:
        groups, packed = self.num_groups(inputs), -(-outputs // _AWQ_PER)
        return {
            f"{stem}.qweight": Part(((inputs, packed),), ("I32",)),
            f"{stem}.qzeros": Part(((groups, packed),), ("I32",)),
            f"{stem}.scales": Part(((groups, outputs),), _SCALES),
        }

    def is_ignored(self, name: str) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Layout:
    """Values of 8 bits with a sign, four bits of exponent and three of fraction."""

    block: tuple[int, int] | None  # (outputs, inputs) that share a scale; None: one a matrix or an output

    @property
    def kept(self) -> WeightForms | None:
        return None

    def has(self, stem: str, entries: Entries) -> bool:
        entry = entries.get(f"{stem}.weight")
        return entry is not None and entry.dtype == FP8

    def parts(self, stem: str, outputs: int, inputs: int, entries: Entries) -> dict[str, Part]:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is not None:
            shapes = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        return {
            f"{stem}.weight": Part(((outputs, inputs),), (FP8,)),
            self.scale_name(stem, entries): Part(shapes, _SCALES),
        }

    def scale_name(self, stem: str, entries: Entries) -> str:
        """The one that is there."""
        names = [f"{stem}.{ending}" for ending in _FP8_SCALE_NAMES]
        return next((name for name in names if name in entries), names[0 if self.block else 1])

    def is_ignored(self, name: str) -> bool:
        """Scales of activations and of keys and values, which are not kept in 8 bits here."""
        return name.endswith((".input_scale", ".k_scale", ".v_scale"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemLayout:
    """What `tandem model quantize` writes."""

    forms: WeightForms

    @property
    def kept(self) -> WeightForms | None:
        return self.forms

    def has(self, stem: str, entries: Entries) -> bool:
        return f"{stem}.codes" in entries

    def parts(self, stem: str, outputs: int, inputs: int, entries: Entries) -> dict[str, Part]:
        groups = (outputs, -(-inputs // GROUP))
        if f"{stem}.minima" not in entries:
            return {
                f"{stem}.codes": Part(((outputs, inputs),), ("I8",)),
                f"{stem}.scales": Part(((outputs,),), ("F32",)),
            }
        return {
            f"{stem}.codes": Part(((outputs, -(-inputs // 2)),), ("U8",)),
            f"{stem}.scales": Part((groups,), ("F16",)),
            f"{stem}.minima": Part((groups,), ("F16",)),
        }

    def is_ignored(self, name: str) -> bool:
        return False
