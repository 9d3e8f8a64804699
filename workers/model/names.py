"""How the tensors of a family are called in its files, and in which shape they lie there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.model.architecture import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names without their `.weight` and `.bias` endings. Layer names follow `prefix + layer.format(i)`."""

    prefix: str  # of everything but the head; files saved from the bare model lack it
    head: str
    embedding: str
    final_norm: str
    layer: str
    attention_norm: str
    mlp_norm: str
    query: str
    key: str  # equal to query when the three are fused
    value: str
    output: str
    up: str
    down: str
    gate: str = ""
    query_norm: str = ""
    key_norm: str = ""
    positions: str = ""
    inputs_first: bool = False  # matrices of the layers lie as (in, out)
    buffers: tuple[str, ...] = ()  # endings of tensors that old files carry and that hold no weights

    @property
    def fused_qkv(self) -> bool:
        """Query, key and value are one tensor, one after the other along its outputs."""
        return self.query == self.key

    def of_layer(self, index: int, name: str) -> str:
        return f"{self.prefix}{self.layer.format(index)}{name}"

    def is_buffer(self, name: str) -> bool:
        return name.endswith(self.buffers) if self.buffers else False


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape in the file, head and embedding included."""
    names = spec.weights
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    found: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, outputs: int, inputs: int, bias: bool) -> None:
        found[f"{name}.weight"] = (inputs, outputs) if names.inputs_first else (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)

    def norm(name: str, size: int, bias: bool = spec.norm_bias) -> None:
        found[f"{name}.weight"] = (size,)
        if bias:
            found[f"{name}.bias"] = (size,)

    found[f"{names.prefix}{names.embedding}.weight"] = (spec.vocab_size, hidden)
    if spec.learned_positions:
        found[f"{names.prefix}{names.positions}.weight"] = (spec.max_model_len, hidden)
    for index in range(spec.num_layers):
        norm(names.of_layer(index, names.attention_norm), hidden)
        if names.fused_qkv:
            matrix(names.of_layer(index, names.query), q_size + 2 * kv_size, hidden, spec.qkv_bias)
        else:
            matrix(names.of_layer(index, names.query), q_size, hidden, spec.qkv_bias)
            matrix(names.of_layer(index, names.key), kv_size, hidden, spec.qkv_bias)
            matrix(names.of_layer(index, names.value), kv_size, hidden, spec.qkv_bias)
        if spec.qk_norm:
            norm(names.of_layer(index, names.query_norm), spec.head_dim, bias=False)
            norm(names.of_layer(index, names.key_norm), spec.head_dim, bias=False)
        matrix(names.of_layer(index, names.output), hidden, q_size, spec.output_bias)
        norm(names.of_layer(index, names.mlp_norm), hidden)
        if spec.gated_mlp:
            matrix(names.of_layer(index, names.gate), inner, hidden, spec.mlp_bias)
        matrix(names.of_layer(index, names.up), inner, hidden, spec.mlp_bias)
        matrix(names.of_layer(index, names.down), hidden, inner, spec.mlp_bias)
    norm(f"{names.prefix}{names.final_norm}", hidden)
    found[f"{names.head}.weight"] = (spec.vocab_size, hidden)
    return found
