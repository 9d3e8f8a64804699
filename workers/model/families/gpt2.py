"""GPT-2 (Radford et al. 2019): layer norm, learned positions, plain MLP, biases everywhere."""

from __future__ import annotations

from workers.model.architecture import ModelSpec, NormKind
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.families.common import (
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INNER,
    MAX_LAYERS,
    MAX_VOCAB,
    activation,
    head_dim_of,
)
from workers.model.names import QkvLayout, WeightNames

GPT2_NAMES = WeightNames(
    prefix="transformer.",
    head="lm_head",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h.{}.",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    query="attn.c_attn",
    qkv=QkvLayout.STACKED,
    output="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    inputs_first=True,
    buffers=(".attn.bias", ".attn.masked_bias"),
)


def gpt2(fields: ConfigFields) -> ModelSpec:
    if fields.flag("add_cross_attention", False):
        raise CheckpointError("config.json: add_cross_attention is not supported")
    hidden = fields.integer("n_embd", high=MAX_HIDDEN)
    layers = fields.integer("n_layer", high=MAX_LAYERS)
    heads = fields.integer("n_head", high=MAX_HEADS)
    head_dim = head_dim_of(hidden, heads)
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    return ModelSpec(
        weights=GPT2_NAMES,
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("n_inner", 4 * hidden, high=MAX_INNER),
        max_model_len=fields.integer("n_positions", 1024, high=1 << 20),
        norm=NormKind.LAYER,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, low=0.0, high=1.0),
        norm_bias=True,
        gated_mlp=False,
        activation=activation(fields, "activation_function", "gelu_new"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rotary=(None,) * layers,
        learned_positions=True,
        attention_scale=tuple(scale / (index + 1 if by_layer else 1) for index in range(layers)),
        sliding_window=(None,) * layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )
