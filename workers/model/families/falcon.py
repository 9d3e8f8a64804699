"""Falcon (Almazrouei et al. 2023): attention and MLP side by side, or one after the other in the first ones.

Three kinds: with `new_decoder_architecture` (40B, 180B, Falcon 2) queries in groups with a KV head each; with
`multi_query` (7B) one KV head; else (RW) as many as query heads. ALiBi, which the RW models have, is refused.
"""

from __future__ import annotations

from dataclasses import replace

from workers.model.architecture import LayerOrder, ModelSpec, NormKind
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
from workers.model.rotary_config import MAX_POSITIONS, longest_context, rotary_from_config

FALCON_NAMES = WeightNames(
    prefix="transformer.",
    head="lm_head",
    embedding="word_embeddings",
    final_norm="ln_f",
    layer="h.{}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    query="self_attention.query_key_value",
    qkv=QkvLayout.BY_KV_HEAD,
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    buffers=("rotary_emb.inv_freq",),
)
TWO_NORMS_NAMES = replace(FALCON_NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp")


def falcon(fields: ConfigFields) -> ModelSpec:
    if fields.flag("alibi", False):
        raise CheckpointError("config.json: alibi is not supported, only rotary positions are")
    hidden = fields.integer("hidden_size", high=MAX_HIDDEN)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = head_dim_of(hidden, heads)
    positions = fields.integer("max_position_embeddings", 2048, high=MAX_POSITIONS)
    rotary = rotary_from_config(fields, head_dim, positions)
    bias, order = fields.flag("bias", False), _order(fields)
    return ModelSpec(
        weights=TWO_NORMS_NAMES if order is LayerOrder.PARALLEL else FALCON_NAMES,
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(fields, heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("ffn_hidden_size", 4 * hidden, high=MAX_INNER),
        max_model_len=longest_context(rotary, positions),
        norm=NormKind.LAYER,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, low=0.0, high=1.0),
        norm_bias=True,
        order=order,
        gated_mlp=False,
        activation=activation(fields, "activation", "gelu"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        rotary=(rotary,) * layers,
        attention_scale=(head_dim**-0.5,) * layers,
        sliding_window=(None,) * layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _order(fields: ConfigFields) -> LayerOrder:
    is_new, is_parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    if is_new and not is_parallel:
        raise CheckpointError("config.json: new_decoder_architecture without parallel_attn is not supported")
    num_norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1, high=2)
    if not is_parallel:
        return LayerOrder.SERIAL
    if num_norms == 2 and not is_new:
        raise CheckpointError(
            "config.json: num_ln_in_parallel_attn 2 without new_decoder_architecture is not supported"
        )
    return LayerOrder.PARALLEL if num_norms == 2 else LayerOrder.PARALLEL_ONE_NORM


def _num_kv_heads(fields: ConfigFields, heads: int) -> int:
    if fields.flag("new_decoder_architecture", False):
        return fields.integer("num_kv_heads", heads, high=MAX_HEADS)
    return 1 if fields.flag("multi_query", True) else heads
