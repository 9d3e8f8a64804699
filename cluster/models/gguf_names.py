"""What GGUF calls the tensors of the architectures that are converted, and which of them a layer has."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_WEIGHTS = frozenset(_BLOCK_NAMES) - {"attn_q_norm", "attn_k_norm"}
_BIASES = frozenset({"attn_q", "attn_k", "attn_v"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One value of `general.architecture`, which is also transformers' model type."""

    name: str
    model_class: str
    weights: frozenset[str] = _WEIGHTS  # tensors of a layer that end in .weight
    biases: frozenset[str] = frozenset()
    is_interleaved: bool = False  # rows of query and key lie as llama.cpp's rotary embedding wants them

    def hugging_face_name(self, gguf_name: str, num_layers: int) -> tuple[str, str] | None:
        """(transformers' name of a tensor, its kind inside a layer); None for one of no such model."""
        if gguf_name in _OUTER_NAMES:
            return _OUTER_NAMES[gguf_name], ""
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
        if match is None or int(match[1]) >= num_layers:
            return None
        if match[2] not in (self.weights if match[3] == "weight" else self.biases):
            return None
        return f"model.layers.{int(match[1])}.{_BLOCK_NAMES[match[2]]}.{match[3]}", match[2]

    def num_tensors(self, num_layers: int, *, is_tied: bool) -> int:
        return num_layers * (len(self.weights) + len(self.biases)) + (2 if is_tied else 3)


ARCHITECTURES = {
    entry.name: entry
    for entry in (
        GgufArchitecture(name="llama", model_class="LlamaForCausalLM", is_interleaved=True),
        GgufArchitecture(name="qwen2", model_class="Qwen2ForCausalLM", biases=_BIASES),
        GgufArchitecture(
            name="qwen3", model_class="Qwen3ForCausalLM", weights=_WEIGHTS | {"attn_q_norm", "attn_k_norm"}
        ),
    )
}
