"""Which tensors a model has, by its spec: names and shapes as they lie in the files."""

from __future__ import annotations

from workers.model.architecture import LayerOrder, ModelSpec, NormPlaces, QkNorm
from workers.model.names import QkvLayout


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape in the file, head and embedding included."""
    names = spec.weights
    hidden = spec.hidden_size
    found: dict[str, tuple[int, ...]] = {f"{names.prefix}{names.embedding}.weight": (spec.vocab_size, hidden)}
    if spec.learned_positions:
        found[f"{names.prefix}{names.positions}.weight"] = (spec.max_model_len, hidden)
    for index in range(spec.num_layers):
        for part, shape in (*_attention(spec), *_mlp_of_layer(spec, index), *_norms(spec)):
            found[names.of_layer(index, part)] = shape
    found |= {f"{names.prefix}{name}": shape for name, shape in _norm(spec, names.final_norm)}
    found[f"{names.head}.weight"] = (spec.vocab_size, hidden)
    return found


_Parts = list[tuple[str, tuple[int, ...]]]  # names in a layer, with their endings, and shapes


def _attention(spec: ModelSpec) -> _Parts:
    names, hidden = spec.weights, spec.hidden_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    found: _Parts = []
    if names.qkv is QkvLayout.SEPARATE:
        for name, size in ((names.query, q_size), (names.key, kv_size), (names.value, kv_size)):
            found += _matrix(spec, name, size, hidden, spec.qkv_bias)
    else:
        found += _matrix(spec, names.query, q_size + 2 * kv_size, hidden, spec.qkv_bias)
    if spec.qk_norm is QkNorm.HEADS:
        q_size = kv_size = spec.head_dim
    if spec.qk_norm is not QkNorm.NONE:
        found += [(f"{names.query_norm}.weight", (q_size,)), (f"{names.key_norm}.weight", (kv_size,))]
    output_inputs = spec.num_heads * spec.head_dim
    return found + _matrix(spec, names.output, hidden, output_inputs, spec.output_bias)


def _mlp_of_layer(spec: ModelSpec, index: int) -> _Parts:
    names, hidden, experts = spec.weights, spec.hidden_size, spec.experts_of_layer(index)
    if experts is None:
        return _mlp(spec)
    found = _matrix(spec, names.router, experts.num_experts, hidden, False)
    for prefix in map(names.expert.format, range(experts.num_experts)):
        for up in (names.expert_gate, names.expert_up):
            found += _matrix(spec, prefix + up, experts.intermediate_size, hidden, False)
        found += _matrix(spec, prefix + names.expert_down, hidden, experts.intermediate_size, False)
    return found


def _mlp(spec: ModelSpec) -> _Parts:
    names, hidden, inner = spec.weights, spec.hidden_size, spec.intermediate_size
    if spec.gated_mlp and names.gate == names.up:
        ups = _matrix(spec, names.up, 2 * inner, hidden, spec.mlp_bias)
    else:
        ups = _matrix(spec, names.up, inner, hidden, spec.mlp_bias)
        if spec.gated_mlp:
            ups = _matrix(spec, names.gate, inner, hidden, spec.mlp_bias) + ups
    return ups + _matrix(spec, names.down, hidden, inner, spec.mlp_bias)


def _norms(spec: ModelSpec) -> _Parts:
    names = spec.weights
    found: _Parts = []
    if spec.norm_places is not NormPlaces.AFTER:
        found += _norm(spec, names.attention_norm)
        if spec.order is not LayerOrder.PARALLEL_ONE_NORM:
            found += _norm(spec, names.mlp_norm)
    if spec.norm_places is not NormPlaces.BEFORE:
        found += _norm(spec, names.attention_post_norm) + _norm(spec, names.mlp_post_norm)
    return found


def _matrix(spec: ModelSpec, name: str, outputs: int, inputs: int, bias: bool) -> _Parts:
    shape = (inputs, outputs) if spec.weights.inputs_first else (outputs, inputs)
    return [(f"{name}.weight", shape), *([(f"{name}.bias", (outputs,))] if bias else [])]


def _norm(spec: ModelSpec, name: str) -> _Parts:
    endings = ("weight", "bias") if spec.norm_bias else ("weight",)
    return [(f"{name}.{ending}", (spec.hidden_size,)) for ending in endings]
