"""The decoder's weights as one fused step, where family and kernels allow it."""

from __future__ import annotations

import torch

from workers.kernels import FusedStep, Kernels, NodeOrder, StepLayer, StepModel
from workers.model.architecture import Activation, LayerOrder, ModelSpec, NormKind, NormPlaces, QkNorm
from workers.model.layers import DecoderWeights, Layer
from workers.model.mlp import DenseMlp
from workers.model.norms import HeadNorms, Norm, RmsNorm
from workers.model.parallel import OrderedLinear, RowParallel, TensorParallel


def has_fused_form(spec: ModelSpec) -> bool:
    """Whether the fused step computes all that the spec says. It knows RMS norms before attention and MLP, of
    heads too, one rotary embedding or none, a gated SiLU MLP after attention, sliding windows; no more."""
    return (
        spec.norm is NormKind.RMS
        and spec.norm_offset == 0.0
        and spec.norm_places is NormPlaces.BEFORE
        and spec.order is LayerOrder.SERIAL
        and spec.gated_mlp
        and spec.experts is None
        and spec.activation is Activation.SILU
        and spec.qk_norm in (QkNorm.NONE, QkNorm.HEADS)
        and len(set(spec.rotary)) == 1
        and not spec.learned_positions
        and spec.attention_soft_cap is None
        and spec.embedding_multiplier == 1.0
        and spec.residual_multiplier == 1.0
        and spec.logits_divisor == 1.0
        and spec.logits_soft_cap is None
    )


def fuse(
    spec: ModelSpec, weights: DecoderWeights, kernels: Kernels, parallel: TensorParallel
) -> FusedStep | None:
    """One call for all layers where `has_fused_form` and the kernels allow it; else None.

    Several ranks add up their parts inside every layer, which a single call can do in shared memory only. A
    rank whose part has no fused form (an odd number of columns) meets the others in the same sums.
    """
    if not has_fused_form(spec) or (parallel.size > 1 and parallel.shared is None):
        return None
    mlps = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, DenseMlp)]
    if len(mlps) < len(weights.layers):
        return None
    return kernels.fuse(
        StepModel(
            embedding=weights.embedding.weight,
            first_id=weights.embedding.first_id,
            vocab_size=spec.vocab_size,
            layers=tuple(map(_layer, weights.layers)),
            final_norm=_weight(weights.final_norm),
            head=weights.head.linear,
            num_heads=len(spec.q_heads_of_rank(parallel.rank, parallel.size)),
            num_kv_heads=len(spec.kv_heads_of_rank(parallel.rank, parallel.size)),
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            collective=parallel.shared,
            output_nodes=_nodes(weights.layers[0].output),
            down_nodes=_nodes(mlps[0].down),
            head_widths=weights.head.widths,
        )
    )


def _layer(layer: Layer) -> StepLayer:
    heads, mlp = layer.query_key_norm, layer.mlp
    assert heads is None or isinstance(heads, HeadNorms), type(heads)
    assert layer.mlp_norm is not None and isinstance(mlp, DenseMlp), type(mlp)
    output, down = layer.output, mlp.down
    return StepLayer(
        attention_norm=_weight(layer.attention_norm),
        qkv=layer.qkv,
        query_norm=None if heads is None else heads.query_weight,
        key_norm=None if heads is None else heads.key_weight,
        output=output.linear if isinstance(output, OrderedLinear) else output,
        output_bias=output.bias if isinstance(output, OrderedLinear) else None,
        mlp_norm=_weight(layer.mlp_norm),
        up=mlp.up,
        down=down.linear if isinstance(down, OrderedLinear) else down,
        down_bias=down.bias if isinstance(down, OrderedLinear) else None,
        scale=layer.scale,
        sliding_window=layer.sliding_window,
    )


def _weight(norm: Norm) -> torch.Tensor:
    assert isinstance(norm, RmsNorm), type(norm)
    return norm.weight


def _nodes(linear: RowParallel) -> NodeOrder | None:
    return linear.order if isinstance(linear, OrderedLinear) else None
