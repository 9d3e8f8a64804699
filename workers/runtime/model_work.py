"""What counts of a model in the work of a step: its matrices, from its shape."""

from __future__ import annotations

from typing import Final

import torch

from workers.engine.work import ModelWork
from workers.model.architecture import ModelSpec
from workers.weight_forms import Quantization, WeightForms

# Bytes of a weight; the scales of INT8, one an output, are left out.
_BYTES: Final = {Quantization.INT8: 1.0, Quantization.INT4: 0.625}


def model_work(
    spec: ModelSpec, dtype: torch.dtype, forms: WeightForms, *, kv_bytes_per_token: int
) -> ModelWork:
    """Over all ranks of a group. KV heads that ranks hold twice are counted once."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (2 * queries + 2 * keys)  # Q, K, V and the output projection
    dense = (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.intermediate_size
    shared, experts, share = spec.num_layers * attention + spec.num_dense_layers * dense, 0, 1.0
    if spec.experts is not None:
        share = spec.experts.share_per_token
        expert = 3 * spec.hidden_size * spec.experts.intermediate_size
        experts = len(spec.experts.layers) * spec.experts.num_experts * expert
    head = spec.vocab_size * spec.hidden_size
    layer_bytes = _BYTES.get(forms.layers, dtype.itemsize)
    head_bytes = _BYTES.get(forms.head, dtype.itemsize)
    return ModelWork(
        linear_weights=shared + round(experts * share),
        head_weights=head,
        attention_width=spec.num_layers * queries,
        weight_bytes=round((shared + experts) * layer_bytes + head * head_bytes),
        expert_bytes=round(experts * layer_bytes),
        expert_share=share,
        kv_bytes_per_token=kv_bytes_per_token,
    )
