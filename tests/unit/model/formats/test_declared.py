"""What a quantization_config means, and what is refused, by name."""

from __future__ import annotations

import pytest

from workers.model.errors import CheckpointError
from workers.model.formats.declared import READ, layout_from_config
from workers.model.formats.layouts import AwqLayout, Fp8Layout, GptqLayout, TandemLayout
from workers.weight_forms import Quantization, WeightForms

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def layout(section: dict[str, object]) -> object:
    return layout_from_config({"quantization_config": section})


def compressed(**weights: object) -> dict[str, object]:
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def test_no_section_is_a_plain_checkpoint() -> None:
    assert layout_from_config({}) is None and layout_from_config({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        (GPTQ, GptqLayout(bits=4, group_size=128, has_order=False, zero_offset=1)),
        (
            {**GPTQ, "bits": 8, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2"},
            GptqLayout(bits=8, group_size=None, has_order=True, zero_offset=0),
        ),
        (AWQ, AwqLayout(group_size=128)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            AwqLayout(group_size=64),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Fp8Layout(block=(128, 128))),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Fp8Layout(block=None)),
        (compressed(), Fp8Layout(block=None)),
        (compressed(strategy="block", block_structure=[128, 128]), Fp8Layout(block=(128, 128))),
        ({**compressed(), "transform_config": {}}, Fp8Layout(block=None)),
        (
            {"quant_method": "tandem", "version": 1, "layers": "int4", "head": "int8"},
            TandemLayout(forms=WeightForms(Quantization.INT4, Quantization.INT8)),
        ),
    ],
)
def test_what_is_read(section: dict[str, object], wanted: object) -> None:
    assert layout(section) == wanted


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({}, "quant_method 'unknown'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({**GPTQ, "bits": 3}, "gptq with 3 bits"),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            "gptq files packed for marlin, which no other kernel can read,",
        ),
        ({**GPTQ, "is_marlin_format": True}, "gptq files packed for marlin, which no other kernel can read,"),
        ({**GPTQ, "dynamic": {"+:layers.0": {"bits": 8}}}, "gptq with bits that differ by layer (`dynamic`)"),
        ({**AWQ, "bits": 8}, "awq with 8 bits"),
        ({**AWQ, "version": "marlin"}, "awq of version 'marlin'"),
        ({**AWQ, "version": "gemv"}, "awq of version 'gemv'"),
        ({**AWQ, "zero_point": False}, "awq without zero points"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "compressed-tensors of format 'pack-quantized'",
        ),
        (compressed(type="int"), "compressed-tensors with weights that are not floats of 8 bits"),
        (
            {**compressed(), "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "compressed-tensors with rotations at run time (`transform_config`)",
        ),
        (compressed(strategy="group"), "compressed-tensors with a scale for every 'group'"),
        (
            {"quant_method": "tandem", "version": 2, "layers": "int4", "head": "int8"},
            "tandem version 2 with layers 'int4' and head 'int8'",
        ),
    ],
)
def test_what_is_refused_by_name(section: dict[str, object], what: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        layout(section)
    assert str(caught.value) == f"config.json: {what} is not read; quantized checkpoints that are: {READ}"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {**GPTQ, "bits": "4"},
            "config.json: quantization_config: bits must be an integer from 1 to 64; got '4'",
        ),
        ({**GPTQ, "group_size": 0}, "group_size must be -1 or at least 1; got 0"),
        ({**GPTQ, "group_size": 1 << 40}, "group_size must be an integer from -1 to 1048576"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be two sizes; got [128]",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be integers from 1"),
        (
            compressed(strategy="block", block_structure=[1, 2, 3]),
            "config_groups.group_0.weights: block_structure must be two sizes; got [1, 2, 3]",
        ),
        (compressed(strategy="block"), "config_groups.group_0.weights lacks block_structure"),
    ],
)
def test_sizes_that_are_not_sane(section: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        layout(section)
    assert message in str(caught.value)
