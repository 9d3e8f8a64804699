"""GPT-NeoX and Pythia (Black et al. 2022): attention and MLP side by side, part of every head turns."""

from __future__ import annotations

from workers.model.architecture import LayerOrder, ModelSpec, NormKind
from workers.model.config_fields import ConfigFields
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
from workers.model.rotary_config import MAX_POSITIONS, RopeKeys, longest_context, rotary_from_config

GPT_NEOX_NAMES = WeightNames(
    prefix="gpt_neox.",
    head="embed_out",
    embedding="embed_in",
    final_norm="final_layer_norm",
    layer="layers.{}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    query="attention.query_key_value",
    qkv=QkvLayout.BY_KV_HEAD,
    output="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    renamed=(("lm_head.", "embed_out."),),
)
_ROPE = RopeKeys(theta="rotary_emb_base", share="rotary_pct", default_share=0.25)


def gpt_neox(fields: ConfigFields) -> ModelSpec:
    hidden = fields.integer("hidden_size", high=MAX_HIDDEN)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = head_dim_of(hidden, heads)
    positions = fields.integer("max_position_embeddings", 2048, high=MAX_POSITIONS)
    rotary = rotary_from_config(fields, head_dim, positions, _ROPE)
    is_parallel = fields.flag("use_parallel_residual", True)
    attention_bias = fields.flag("attention_bias", True)
    return ModelSpec(
        weights=GPT_NEOX_NAMES,
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", high=MAX_INNER),
        max_model_len=longest_context(rotary, positions),
        norm=NormKind.LAYER,
        norm_eps=fields.number("layer_norm_eps", 1e-5, low=0.0, high=1.0),
        norm_bias=True,
        order=LayerOrder.PARALLEL if is_parallel else LayerOrder.SERIAL,
        gated_mlp=False,
        activation=activation(fields, "hidden_act", "gelu"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
        rotary=(rotary,) * layers,
        attention_scale=(head_dim**-0.5,) * layers,
        sliding_window=(None,) * layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
    )
