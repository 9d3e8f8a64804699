"""From a transformers config to a ModelSpec, and whether a model can be split over a number of ranks.

A new dense family costs one function here, an entry in FAMILIES, and its WeightNames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workers.model.architecture import Activation, ModelSpec, NormKind, RotarySpec
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.names import GPT2_NAMES, LLAMA_NAMES
from workers.model.rotary_config import MAX_POSITIONS, longest_context, rotary_from_config

# Sizes beyond these are a damaged or hostile file, not a model.
_MAX_HIDDEN = 1 << 17
_MAX_INNER = 1 << 20
_MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_HEAD_DIM = 1024
_MAX_VOCAB = 1 << 22

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def spec_from_config(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a checkpoint's `config.json`.

    Raises CheckpointError for an unsupported model type, a missing key, or a size that is not sane.
    """
    fields = ConfigFields(config)
    if fields.has("quantization_config"):
        method = ConfigFields(fields.section("quantization_config")).text("quant_method", "unknown")
        raise CheckpointError(f"config.json: quantized checkpoints ({method[:40]}) are not supported")
    model_type = fields.text("model_type")
    make = FAMILIES.get(model_type)
    if make is None:
        raise CheckpointError(
            f"config.json: model type {model_type[:40]!r} is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    spec = make(fields)
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: {spec.num_heads} attention heads are not a multiple of "
            f"{spec.num_kv_heads} KV heads"
        )
    return spec


def legal_tensor_parallel(spec: ModelSpec) -> list[int]:
    """Group sizes the model can be split into, ascending.

    Up to the number of KV heads any size works: ranks hold whole KV heads with their query heads, some one
    more than others. Beyond it KV heads are copied, so the size must be a multiple of their number and divide
    the query heads.
    """
    whole = range(1, spec.num_kv_heads + 1)
    copied = (
        size
        for size in range(2 * spec.num_kv_heads, spec.num_heads + 1, spec.num_kv_heads)
        if spec.num_heads % size == 0
    )
    limit = min(spec.vocab_size, spec.intermediate_size)
    return [size for size in (*whole, *copied) if size <= limit]


def check_tensor_parallel(spec: ModelSpec, tensor_parallel: int) -> None:
    """Raises TensorParallelError when the model cannot be split into that many ranks."""
    legal = legal_tensor_parallel(spec)
    if tensor_parallel not in legal:
        raise TensorParallelError(
            f"tensor_parallel {tensor_parallel} does not fit {spec.num_heads} attention heads and "
            f"{spec.num_kv_heads} KV heads; sizes that work: {', '.join(map(str, legal))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What tells a family of the Llama kind from the others, and what its config leaves unsaid."""

    default_positions: int
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden size over heads
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # of all layers
    has_layered_window: bool = False  # the config says which layers have one


def _llama(fields: ConfigFields) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    traits = _Traits(
        default_positions=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return _llama_like(fields, traits)


def _mistral(fields: ConfigFields) -> ModelSpec:
    # An absent key means the trained default, null means no window.
    if fields.mentions("sliding_window") and not fields.has("sliding_window"):
        window = None
    else:
        window = fields.integer("sliding_window", 4096, high=MAX_POSITIONS)
    kv_heads = None if fields.mentions("num_key_value_heads") else 8
    return _llama_like(fields, _Traits(default_positions=4096 * 32, default_kv_heads=kv_heads, window=window))


def _qwen2(fields: ConfigFields) -> ModelSpec:
    return _llama_like(fields, _Traits(default_positions=32768, qkv_bias=True, has_layered_window=True))


def _qwen3(fields: ConfigFields) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    traits = _Traits(
        default_positions=32768,
        default_head_dim=128,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        has_layered_window=True,
    )
    return _llama_like(fields, traits)


def _llama_like(fields: ConfigFields, traits: _Traits) -> ModelSpec:
    """RMS norm, rotary positions, gated MLP."""
    hidden = fields.integer("hidden_size", high=_MAX_HIDDEN)
    layers = fields.integer("num_hidden_layers", high=_MAX_LAYERS)
    heads = fields.integer("num_attention_heads", high=_MAX_HEADS)
    head_dim = fields.integer(
        "head_dim", traits.default_head_dim or max(1, hidden // heads), high=_MAX_HEAD_DIM
    )
    positions = fields.integer("max_position_embeddings", traits.default_positions, high=MAX_POSITIONS)
    rotary: RotarySpec = rotary_from_config(fields, head_dim, positions)
    return ModelSpec(
        weights=LLAMA_NAMES,
        vocab_size=fields.integer("vocab_size", high=_MAX_VOCAB),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", traits.default_kv_heads or heads, high=_MAX_HEADS),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", high=_MAX_INNER),
        max_model_len=longest_context(rotary, positions),
        norm=NormKind.RMS,
        norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        gated_mlp=True,
        activation=_activation(fields, "hidden_act", "silu"),
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        rotary=rotary,
        learned_positions=False,
        attention_scale=(head_dim**-0.5,) * layers,
        sliding_window=(
            _windows_by_layer(fields, layers) if traits.has_layered_window else (traits.window,) * layers
        ),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _windows_by_layer(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Qwen: `use_sliding_window` switches all of it, `layer_types` or `max_window_layers` name the layers."""
    window = None
    no_window = fields.mentions("sliding_window") and not fields.has("sliding_window")
    if fields.flag("use_sliding_window", False) and not no_window:
        window = fields.integer("sliding_window", 4096, high=MAX_POSITIONS)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, low=0, high=_MAX_LAYERS)
        return tuple(window if index >= first else None for index in range(layers))
    kinds = fields.texts("layer_types", layers)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"config.json: layer_types: {unknown[0][:40]!r} is not supported")
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(
            "config.json: layer_types names sliding_attention but the sliding window is off"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gpt2(fields: ConfigFields) -> ModelSpec:
    """GPT-2 (Radford et al. 2019): layer norm, learned positions, plain MLP, biases everywhere."""
    if fields.flag("add_cross_attention", False):
        raise CheckpointError("config.json: add_cross_attention is not supported")
    hidden = fields.integer("n_embd", high=_MAX_HIDDEN)
    layers = fields.integer("n_layer", high=_MAX_LAYERS)
    heads = fields.integer("n_head", high=_MAX_HEADS)
    if hidden % heads:
        raise CheckpointError(f"config.json: n_embd {hidden} is not a multiple of n_head {heads}")
    head_dim = hidden // heads
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    return ModelSpec(
        weights=GPT2_NAMES,
        vocab_size=fields.integer("vocab_size", high=_MAX_VOCAB),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("n_inner", 4 * hidden, high=_MAX_INNER),
        max_model_len=fields.integer("n_positions", 1024, high=1 << 20),
        norm=NormKind.LAYER,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, low=0.0, high=1.0),
        gated_mlp=False,
        activation=_activation(fields, "activation_function", "gelu_new"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        rotary=None,
        learned_positions=True,
        attention_scale=tuple(scale / (index + 1 if by_layer else 1) for index in range(layers)),
        sliding_window=(None,) * layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _activation(fields: ConfigFields, key: str, default: str) -> Activation:
    named = fields.text(key, default)
    if named not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} {named[:40]!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[named]


FAMILIES: Mapping[str, Callable[[ConfigFields], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
}
