"""Checkpoints in few bits, packed here from the definition of each form, and the values that they stand for.

A form is made of a plain checkpoint: every linear weight of the layers is put on a grid and written in the
form's parts. `Made.plain` is a plain float32 checkpoint of the values on the grid: the one that transformers
should be asked about. Nothing of the product's reading is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models import checkpoints

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of an integer belongs to, lowest first
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Made:
    """A checkpoint in a form, and the plain one of its values."""

    folder: Path
    plain: Path


@dataclass(frozen=True)
class Form:
    """How matrices are written: `pack(weight (out, in), generator)` gives the parts by their endings and the
    values of the matrix; `config` is the quantization_config."""

    name: str
    config: dict[str, object]
    pack: Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Grid:
    """value = scale * (code - zero)."""

    codes: torch.Tensor  # (out, in) int64
    scales: torch.Tensor  # (out, groups) float16
    zeros: torch.Tensor  # (out, groups) int64
    group_of: torch.Tensor  # (in,)

    def values(self) -> torch.Tensor:
        return self.scales.float()[:, self.group_of] * (self.codes - self.zeros[:, self.group_of]).float()


def to_grid(weight: torch.Tensor, bits: int, group_of: torch.Tensor, *, is_symmetric: bool) -> Grid:
    """The plain way: least and largest weight of a group are the ends of its grid."""
    largest, groups = (1 << bits) - 1, int(group_of.max()) + 1
    scales = torch.empty(weight.shape[0], groups, dtype=torch.float16)
    zeros = torch.empty(weight.shape[0], groups, dtype=torch.int64)
    for group in range(groups):
        part = weight[:, group_of == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / largest).half()
        scales[:, group] = scale
        middle = torch.full_like(low, (largest + 1) // 2)
        zeros[:, group] = (
            middle if is_symmetric else (-low / scale.float()).round().clamp(0, largest)
        ).long()
    steps = weight / scales.float()[:, group_of] + zeros[:, group_of]
    return Grid(steps.round().clamp(0, largest).long(), scales, zeros, group_of)


def to_int32(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """codes (n, m) -> (n, m * bits / 32): code order[i] of each integer lies in its bits from i * bits."""
    per = 32 // bits
    grouped = codes.view(codes.shape[0], -1, per)
    found = torch.zeros(grouped.shape[:2], dtype=torch.int64)
    for i in range(per):
        found |= grouped[:, :, i if order is None else order[i]] << (bits * i)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def _even(inputs: int, group_size: int) -> torch.Tensor:
    return torch.arange(inputs) // (inputs if group_size == -1 else group_size)


def gptq(
    name: str,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    version: str = "gptq",
    has_index: bool = True,
) -> Form:
    """As AutoGPTQ writes it, with its bias of zeros."""

    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        group_of = _even(weight.shape[1], group_size)
        if desc_act:
            group_of = group_of[torch.randperm(weight.shape[1], generator=generator)]
        grid = to_grid(weight, bits, group_of, is_symmetric=sym)
        stored_zeros = (grid.zeros - int(version == "gptq")) & ((1 << bits) - 1)
        parts = {
            "qweight": to_int32(grid.codes, bits).T.contiguous(),
            "qzeros": to_int32(stored_zeros.T.contiguous(), bits),
            "scales": grid.scales.T.contiguous(),
            "bias": torch.zeros(weight.shape[0], dtype=torch.float16),
        }
        if has_index:
            parts["g_idx"] = group_of.to(torch.int32)
        return parts, grid.values()

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": version,
    }
    return Form(name, config, pack)


def awq(name: str, group_size: int = 32) -> Form:
    """As AutoAWQ writes its version gemm."""

    def pack(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        grid = to_grid(weight, 4, _even(weight.shape[1], group_size), is_symmetric=False)
        parts = {
            "qweight": to_int32(grid.codes.T.contiguous(), 4, AWQ_ORDER),
            "qzeros": to_int32(grid.zeros.T.contiguous(), 4, AWQ_ORDER),
            "scales": grid.scales.T.contiguous(),
        }
        return parts, grid.values()

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
    }
    return Form(name, config, pack)


def fp8(
    name: str,
    config: dict[str, object],
    *,
    block: tuple[int, int] | None,
    scale_name: str,
    kind: str = "tensor",
) -> Form:
    """kind: a scale of the whole `tensor`, or one a `row` as (out, 1)."""

    def pack(weight: torch.Tensor, _: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        height, width = block or ((1, inputs) if kind == "row" else (outputs, inputs))
        scales = torch.empty(-(-outputs // height), -(-inputs // width))
        values, floats = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                scales[i, j] = weight[part].abs().max() / 448
                floats[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                values[part] = floats[part].float() * scales[i, j]
        stored = scales.reshape(()) if kind == "tensor" and block is None else scales
        parts = {"weight": floats, scale_name: stored, "input_scale": torch.ones(())}
        return parts, values

    return Form(name, config, pack)


def _compressed(strategy: str) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


FORMS = (
    gptq("gptq"),
    gptq("gptq_asymmetric", sym=False),
    gptq("gptq_order", sym=False, desc_act=True),
    gptq("gptq_v2", sym=False, version="gptq_v2", has_index=False),
    gptq("gptq_8", bits=8, sym=False),
    gptq("gptq_whole", group_size=-1, has_index=False),
    awq("awq"),
    awq("awq_16", group_size=16),
    fp8("fp8", {"quant_method": "fp8"}, block=None, scale_name="weight_scale"),
    fp8(
        "fp8_block",
        {"quant_method": "fp8", "weight_block_size": [24, 40], "fmt": "e4m3"},
        block=(24, 40),
        scale_name="weight_scale_inv",
    ),
    fp8("fp8_row", {"quant_method": "fbgemm_fp8"}, block=None, scale_name="weight_scale", kind="row"),
    fp8("compressed", _compressed("channel"), block=None, scale_name="weight_scale", kind="row"),
)


def form(name: str) -> Form:
    """The form called `name`."""
    return next(entry for entry in FORMS if entry.name == name)


def make(folder: Path, plain: Path, form: Form, *, left_out: str | None = None) -> Made:
    """Writes `plain` in a form to folder/form, and its values to folder/plain. left_out: how the names begin
    of matrices that stay plain."""
    generator = torch.Generator().manual_seed(5)
    packed, values = folder / "form", folder / "plain"
    shutil.copytree(plain, packed)
    shutil.copytree(plain, values)
    of_form: Tensors = {}
    of_values: Tensors = {}
    is_conv1d = json.loads((plain / "config.json").read_text())["model_type"] == "gpt2"
    for name, tensor in load_file(plain / "model.safetensors").items():
        of_values[name] = of_form[name] = tensor
        if left_out is not None and name.startswith(left_out):
            continue
        if tensor.ndim == 2 and ("layers." in name or ".h." in name):
            parts, found = form.pack(tensor.T.contiguous() if is_conv1d else tensor, generator)
            del of_form[name]
            of_values[name] = found.T.contiguous() if is_conv1d else found
            stem = name.removesuffix("weight")
            of_form |= {f"{stem}{ending}": part for ending, part in parts.items()}
    # A matrix's own bias, where there is one, stands for the form's bias of zeros.
    of_form |= {name: tensor for name, tensor in of_values.items() if name.endswith(".bias")}
    for place, tensors in ((packed, of_form), (values, of_values)):
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    checkpoints.edit_json(packed / "config.json", quantization_config=form.config)
    return Made(packed, values)
