"""What `quantization_config` in a config.json says about the files.

A method, a format or a setting that gives weights another meaning than those read here is refused; keys that
are not known are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.formats.layouts import AwqLayout, Fp8Layout, GptqLayout, Layout, TandemLayout
from workers.weight_forms import Quantization, WeightForms

SECTION = "quantization_config"
TANDEM = "tandem"
TANDEM_VERSION = 1
READ = (
    "gptq (4 and 8 bits), awq (4 bits, gemm), fp8 (e4m3), fbgemm_fp8, compressed-tensors (float-quantized), "
    "and what `tandem model quantize` writes"
)
_MAX_GROUP = 1 << 20
_MAX_BLOCK = 1 << 16
_QUANTIZED = ("int8", "int4")


def layout_from_config(config: Mapping[str, object]) -> Layout | None:
    """How the linear weights of the checkpoint are stored; None: as in any other.

    Raises CheckpointError naming the method or the setting that is not read, and the methods that are.
    """
    fields = ConfigFields(config)
    if not fields.has(SECTION):
        return None
    section = ConfigFields(fields.section(SECTION), f"config.json: {SECTION}")
    method = section.text("quant_method", "unknown")
    match method.lower():
        case "gptq":
            return _gptq(section)
        case "awq":
            return _awq(section)
        case "fp8":
            return Fp8Layout(block=_block(section))
        case "fbgemm_fp8":
            return Fp8Layout(block=None)
        case "compressed-tensors":
            return _compressed(section)
        case "tandem":
            return _tandem(section)
    raise _refused(f"quant_method {method[:40]!r}")


def _gptq(section: ConfigFields) -> Layout:
    bits = section.integer("bits", high=64)
    if bits not in (4, 8):
        raise _refused(f"gptq with {bits} bits")
    form = section.text("checkpoint_format", "gptq").lower()
    if form not in ("gptq", "gptq_v2") or section.flag("is_marlin_format", False):
        shown = "marlin" if form in ("gptq", "gptq_v2") else form[:40]
        raise _refused(f"gptq files packed for {shown}, which no other kernel can read,")
    if section.section("dynamic"):
        raise _refused("gptq with bits that differ by layer (`dynamic`)")
    return GptqLayout(
        bits=bits,
        group_size=_group_size(section, "group_size"),
        has_order=section.flag("desc_act", False) and not section.flag("static_groups", False),
        zero_offset=1 if form == "gptq" else 0,
    )


def _awq(section: ConfigFields) -> Layout:
    bits_key = "bits" if section.has("bits") else "w_bit"
    bits = section.integer(bits_key, 4, high=64)
    if bits != 4:
        raise _refused(f"awq with {bits} bits")
    version_key = "version" if section.has("version") else "format"
    version = section.text(version_key, "gemm").lower()
    if version != "gemm":
        raise _refused(f"awq of version {version[:40]!r}")
    if not section.flag("zero_point", True):
        raise _refused("awq without zero points")
    key = "group_size" if section.has("group_size") else "q_group_size"
    return AwqLayout(group_size=_group_size(section, key))


def _group_size(section: ConfigFields, key: str) -> int | None:
    """-1 means that all inputs of an output share a scale."""
    size = section.integer(key, 128, low=-1, high=_MAX_GROUP)
    if size == 0:
        raise CheckpointError(f"config.json: {SECTION}: {key} must be -1 or at least 1; got 0")
    return None if size == -1 else size


def _block(section: ConfigFields) -> tuple[int, int] | None:
    key = "weight_block_size"
    return _sizes(section, key, f"config.json: {SECTION}") if section.has(key) else None


def _sizes(fields: ConfigFields, key: str, where: str) -> tuple[int, int]:
    sizes = fields.integers(key, low=1, high=_MAX_BLOCK)
    if len(sizes) != 2:
        raise CheckpointError(f"{where}: {key} must be two sizes; got {sizes}")
    return sizes[0], sizes[1]


def _compressed(section: ConfigFields) -> Layout:
    """Of compressed-tensors only weights of fp8, whose files are those of fp8."""
    form = section.text("format", "unknown")
    if form not in ("float-quantized", "naive-quantized"):
        raise _refused(f"compressed-tensors of format {form[:40]!r}")
    if section.section("transform_config"):
        raise _refused("compressed-tensors with rotations at run time (`transform_config`)")
    blocks: set[tuple[int, int] | None] = set()
    groups = ConfigFields(section.section("config_groups"), f"config.json: {SECTION}: config_groups")
    for name in section.section("config_groups"):
        where = f"config.json: {SECTION}: config_groups.{name[:40]}"
        weights = ConfigFields(groups.section(name), where).section("weights")
        scheme = ConfigFields(weights, f"{where}.weights")
        if (scheme.text("type", "int"), scheme.integer("num_bits", 8, high=64)) != ("float", 8):
            raise _refused("compressed-tensors with weights that are not floats of 8 bits")
        strategy = scheme.text("strategy", "tensor")
        if strategy == "block":
            blocks.add(_sizes(scheme, "block_structure", f"{where}.weights"))
        elif strategy in ("tensor", "channel"):
            blocks.add(None)
        else:
            raise _refused(f"compressed-tensors with a scale for every {strategy[:40]!r}")
    if len(blocks) != 1:
        raise _refused("compressed-tensors without one form for all weights")
    return Fp8Layout(block=blocks.pop())


def _tandem(section: ConfigFields) -> Layout:
    version = section.integer("version", high=1 << 20)
    layers, head = section.text("layers"), section.text("head")
    if version != TANDEM_VERSION or layers not in _QUANTIZED or head not in _QUANTIZED:
        raise _refused(f"tandem version {version} with layers {layers[:20]!r} and head {head[:20]!r}")
    return TandemLayout(forms=WeightForms(Quantization(layers), Quantization(head)))


def _refused(what: str) -> CheckpointError:
    return CheckpointError(f"config.json: {what} is not read; quantized checkpoints that are: {READ}")
