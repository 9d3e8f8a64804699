"""Mixtures of experts (Shazeer et al. 2017): Mixtral (Jiang et al. 2024) and Qwen3-MoE (Yang et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from workers.model.architecture import ExpertsSpec, ModelSpec, QkNorm
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.families.common import MAX_INNER, MAX_LAYERS
from workers.model.families.llama import LLAMA_NAMES, Traits, llama_like
from workers.model.names import WeightNames
from workers.model.rotary_config import MAX_POSITIONS, RopeKeys

_MAX_EXPERTS = 1024
_MAX_EXPERTS_OF_ALL_LAYERS = 1 << 16  # a name is made for every tensor of the config before any is looked for

MIXTRAL_NAMES = replace(
    LLAMA_NAMES,
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    renamed_parts=((".mlp.", ".block_sparse_moe."),),  # as transformers 5 calls it in memory
)
QWEN3_MOE_NAMES = replace(
    LLAMA_NAMES,
    router="mlp.gate",
    expert="mlp.experts.{}.",
    expert_gate="gate_proj",
    expert_up="up_proj",
    expert_down="down_proj",
)


def mixtral(fields: ConfigFields) -> ModelSpec:
    """Experts in every layer."""
    traits = Traits(
        default_positions=4096 * 32,
        default_kv_heads=None if fields.mentions("num_key_value_heads") else 8,
        default_eps=1e-5,
        window=fields.optional_integer("sliding_window", None, high=MAX_POSITIONS),
        rope=RopeKeys(default_theta=1e6),
    )
    plain = llama_like(fields, traits)
    num_experts = fields.integer("num_local_experts", 8, high=_MAX_EXPERTS)
    experts = ExpertsSpec(
        layers=tuple(range(plain.num_layers)),
        num_experts=num_experts,
        num_per_token=fields.integer("num_experts_per_tok", 2, high=num_experts),
        intermediate_size=plain.intermediate_size,
        is_renormalized=True,
    )
    return _with_experts(plain, MIXTRAL_NAMES, experts)


def qwen3_moe(fields: ConfigFields) -> ModelSpec:
    """Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""
    attention_bias = fields.flag("attention_bias", False)
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 4096, high=MAX_POSITIONS)
    traits = Traits(
        default_positions=32768,
        default_kv_heads=4,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=QkNorm.HEADS,
        window=window,
    )
    plain = llama_like(fields, traits)
    dense: set[int] = set()
    if fields.has("mlp_only_layers"):
        dense.update(fields.integers("mlp_only_layers", low=0, high=MAX_LAYERS))
    step = fields.integer("decoder_sparse_step", 1, high=MAX_LAYERS)
    count_key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(count_key, 128, high=_MAX_EXPERTS)
    experts = ExpertsSpec(
        layers=tuple(index for index in range(step - 1, plain.num_layers, step) if index not in dense),
        num_experts=num_experts,
        num_per_token=fields.integer("num_experts_per_tok", 8, high=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size", 768, high=MAX_INNER),
        is_renormalized=fields.flag("norm_topk_prob", False),
    )
    return _with_experts(plain, QWEN3_MOE_NAMES, experts)


def _with_experts(plain: ModelSpec, names: WeightNames, experts: ExpertsSpec) -> ModelSpec:
    total = len(experts.layers) * experts.num_experts
    if total > _MAX_EXPERTS_OF_ALL_LAYERS:
        raise CheckpointError(
            f"config.json: {total} experts in all layers; at most {_MAX_EXPERTS_OF_ALL_LAYERS} are supported"
        )
    return replace(plain, weights=names, experts=experts if experts.layers else None)
