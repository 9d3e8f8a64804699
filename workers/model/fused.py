"""The decoder's weights as one fused step, where family and kernels allow it."""

from __future__ import annotations

from workers.kernels import FusedStep, Kernels, StepLayer, StepModel
from workers.model.architecture import Activation, ModelSpec, NormKind
from workers.model.layers import DecoderWeights, Layer
from workers.model.parallel import TensorParallel


def fuse(
    spec: ModelSpec, weights: DecoderWeights, kernels: Kernels, parallel: TensorParallel
) -> FusedStep | None:
    """One call for all layers, for RMS norms and a gated SiLU MLP; else None.

    Several ranks add up their parts inside every layer, which a single call can do in shared memory only. A
    rank whose part has no fused form (an odd number of columns) meets the others in the same sums.
    """
    is_llama_like = spec.norm is NormKind.RMS and spec.gated_mlp and spec.activation is Activation.SILU
    is_llama_like &= weights.positions is None
    if not is_llama_like or (parallel.size > 1 and parallel.shared is None):
        return None
    return kernels.fuse(
        StepModel(
            embedding=weights.embedding.weight,
            first_id=weights.embedding.first_id,
            vocab_size=spec.vocab_size,
            layers=tuple(map(_layer, weights.layers)),
            final_norm=weights.final_norm.weight,
            head=weights.head.linear,
            num_heads=len(spec.q_heads_of_rank(parallel.rank, parallel.size)),
            num_kv_heads=len(spec.kv_heads_of_rank(parallel.rank, parallel.size)),
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            collective=parallel.shared,
        )
    )


def _layer(layer: Layer) -> StepLayer:
    return StepLayer(
        attention_norm=layer.attention_norm.weight,
        qkv=layer.qkv,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        output=layer.output.linear,
        mlp_norm=layer.mlp_norm.weight,
        up=layer.up,
        down=layer.down.linear,
        scale=layer.scale,
        sliding_window=layer.sliding_window,
    )
