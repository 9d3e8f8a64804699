"""The arithmetic of inference: parameters, bytes and operations of a decoder, from its spec alone.

Symbols as in papers: L layers, H hidden size, A attention heads, K key/value heads, D head dim, F inner size
of the MLP or of an expert, V vocabulary, E experts of a layer, k those of a token. Keys and values have K
heads, not A: a formula with H is wrong for grouped queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from workers.model.architecture import ModelSpec
from workers.model.expected import expected_tensors
from workers.runtime.pool_size import bytes_per_block
from workers.weight_forms import GROUP, Quantization, WeightForms

PLAIN = WeightForms()
_SCALE_BYTES = 4  # of INT8, one float32 an output; of INT4, scale and minimum of a group, half precision each


def num_parameters(spec: ModelSpec, *, is_tied: bool) -> int:
    """Of the whole model; a tied head is the embedding and counts once."""
    total = sum(math.prod(shape) for shape in expected_tensors(spec).values())
    return total - (head_parameters(spec) if is_tied else 0)


def layer_linear_parameters(spec: ModelSpec, rank: int = 0, tensor_parallel: int = 1) -> int:
    """In the matrix products of all layers, as one rank has them: L (H (A + 2K) D + A D H + 3 H F), or
    3 H F E with experts. The matrices that choose these are left out."""
    return _parameters_of(_matrices(spec, rank, tensor_parallel))


def active_parameters(spec: ModelSpec, *, is_tied: bool) -> int:
    """Of the whole model, without the experts that a token does not go through."""
    return num_parameters(spec, is_tied=is_tied) - _idle_parameters(spec)


def head_parameters(spec: ModelSpec) -> int:
    """V x H of the head."""
    return spec.vocab_size * spec.hidden_size


def weight_bytes(
    spec: ModelSpec,
    *,
    is_tied: bool,
    element_bytes: int = 2,
    forms: WeightForms = PLAIN,
    rank: int = 0,
    tensor_parallel: int = 1,
) -> int:
    """What a rank keeps of the weights. Embedding and norms stay in the model's dtype; of quantized models
    the layers' matrices and the head are smaller, with their scales, and a tied head stands beside its
    embedding."""
    vocab = len(spec.vocab_of_rank(rank, tensor_parallel))
    matrices = _bytes_of(_matrices(spec, rank, tensor_parallel), element_bytes, forms.layers)
    embedding = vocab * spec.hidden_size * element_bytes
    head = matrix_bytes(vocab, spec.hidden_size, element_bytes, forms.head)
    is_shared = is_tied and forms.head is Quantization.NONE
    return matrices + embedding + (0 if is_shared else head) + _small_parameters(spec) * element_bytes


def read_bytes(
    spec: ModelSpec,
    *,
    element_bytes: int = 2,
    forms: WeightForms = PLAIN,
    rank: int = 0,
    tensor_parallel: int = 1,
) -> int:
    """What a rank reads of the weights in a step of many tokens: all matrices and the head once, of the
    embedding next to nothing."""
    vocab = len(spec.vocab_of_rank(rank, tensor_parallel))
    head = matrix_bytes(vocab, spec.hidden_size, element_bytes, forms.head)
    return _bytes_of(_matrices(spec, rank, tensor_parallel), element_bytes, forms.layers) + head


def expert_bytes(spec: ModelSpec, *, element_bytes: int = 2, forms: WeightForms = PLAIN) -> int:
    """Of `read_bytes` those of experts, of the whole model."""
    if spec.experts is None:
        return 0
    return _bytes_of(_of_experts(spec, spec.experts.num_experts), element_bytes, forms.layers)


def expert_parameters(spec: ModelSpec) -> int:
    """Of `layer_linear_parameters` those of experts, of the whole model."""
    return 0 if spec.experts is None else _parameters_of(_of_experts(spec, spec.experts.num_experts))


def matrix_bytes(outputs: int, inputs: int, element_bytes: int, form: Quantization) -> int:
    """One weight matrix in memory, as `workers.kernels.quantized` describes the forms."""
    match form:
        case Quantization.NONE:
            return outputs * inputs * element_bytes
        case Quantization.INT8:
            return outputs * (inputs + _SCALE_BYTES)
        case Quantization.INT4:
            groups = -(-inputs // GROUP)
            return outputs * (-(-inputs // 2) + groups * _SCALE_BYTES)
    raise ValueError(f"{form} is a choice for loading, not a form")


def kv_bytes_per_token(
    spec: ModelSpec, *, dtype: str = "bfloat16", rank: int | None = None, tensor_parallel: int = 1
) -> int:
    """2 (K and V) x L x K x D x bytes, of the whole model or of the heads of a rank; int8 with its scales."""
    heads = spec.num_kv_heads if rank is None else len(spec.kv_heads_of_rank(rank, tensor_parallel))
    return bytes_per_block(spec, heads, 1, dtype)


def attended_pairs(spec: ModelSpec, tokens: int, cached: int = 0) -> float:
    """Pairs of query and key in causal attention of `tokens` after `cached`, the mean over the layers: with a
    sliding window of W a token sees the last W, itself included."""
    total = sum(
        _pairs_within(window, cached + tokens) - _pairs_within(window, cached)
        for window in spec.sliding_window
    )
    return total / spec.num_layers


def attended_tokens(spec: ModelSpec, context: int) -> float:
    """Tokens that one decode row reads, the mean over the layers."""
    return (
        sum(context if window is None else min(window, context) for window in spec.sliding_window)
        / spec.num_layers
    )


def linear_flop(spec: ModelSpec, tokens: int) -> int:
    """2 x parameters that a token goes through in the layers' matrices x T. The head is not in it: prefill
    needs it for one row."""
    return 2 * (layer_linear_parameters(spec) - _idle_parameters(spec)) * tokens


def head_flop(spec: ModelSpec, rows: int = 1) -> int:
    """2 x V x H for each row whose logits are wanted."""
    return 2 * head_parameters(spec) * rows


def pair_flop(spec: ModelSpec) -> int:
    """4 x L x A x D: scores and weighted values of one query and one key in all layers and heads."""
    return 4 * spec.num_layers * spec.num_heads * spec.head_dim


def prefill_flop(spec: ModelSpec, tokens: int, cached: int = 0) -> float:
    """Linear and attention, without the head."""
    return linear_flop(spec, tokens) + pair_flop(spec) * attended_pairs(spec, tokens, cached)


def textbook_prefill_flop(spec: ModelSpec, tokens: int) -> int:
    """2 x L x H^2 x T: one H x H product a layer. Found in teaching texts; many times too low."""
    return 2 * spec.num_layers * spec.hidden_size**2 * tokens


class _Matrices(NamedTuple):
    """Equal matrices of all layers."""

    outputs: int
    inputs: int
    number: int


def _matrices(spec: ModelSpec, rank: int, tensor_parallel: int) -> list[_Matrices]:
    """Of the products of all layers, as the rank has them."""
    queries = len(spec.q_heads_of_rank(rank, tensor_parallel)) * spec.head_dim
    keys = len(spec.kv_heads_of_rank(rank, tensor_parallel)) * spec.head_dim
    inner = len(spec.intermediate_of_rank(rank, tensor_parallel))
    found = [
        _Matrices(queries + 2 * keys, spec.hidden_size, spec.num_layers),
        _Matrices(spec.hidden_size, queries, spec.num_layers),
        _Matrices((2 if spec.gated_mlp else 1) * inner, spec.hidden_size, spec.num_dense_layers),
        _Matrices(spec.hidden_size, inner, spec.num_dense_layers),
    ]
    if spec.experts is not None:
        found += _of_experts(spec, len(spec.experts.of_rank(rank, tensor_parallel)))
    return found


def _of_experts(spec: ModelSpec, number: int) -> list[_Matrices]:
    """Of so many experts of each layer that has any."""
    assert spec.experts is not None
    inner, number = spec.experts.intermediate_size, number * len(spec.experts.layers)
    return [_Matrices(2 * inner, spec.hidden_size, number), _Matrices(spec.hidden_size, inner, number)]


def _parameters_of(matrices: list[_Matrices]) -> int:
    return sum(found.number * found.outputs * found.inputs for found in matrices)


def _bytes_of(matrices: list[_Matrices], element_bytes: int, form: Quantization) -> int:
    return sum(
        found.number * matrix_bytes(found.outputs, found.inputs, element_bytes, form) for found in matrices
    )


def _idle_parameters(spec: ModelSpec) -> int:
    """Of the experts that a token does not go through."""
    if spec.experts is None:
        return 0
    return _parameters_of(_of_experts(spec, spec.experts.num_experts - spec.experts.num_per_token))


def _small_parameters(spec: ModelSpec) -> int:
    """Norms, biases, learned positions, and what chooses experts: each rank is counted to hold them whole."""
    matrices = layer_linear_parameters(spec) + 2 * head_parameters(spec)
    return num_parameters(spec, is_tied=False) - matrices


def _pairs_within(window: int | None, tokens: int) -> int:
    """Pairs of the first `tokens` of a sequence."""
    if window is None or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window
