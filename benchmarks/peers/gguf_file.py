"""A checkpoint folder (Llama or Qwen2, bfloat16 safetensors) as a GGUF file without a tokenizer.

Only for the benchmark's token ids: `tokenizer.ggml.model` is `none`. Weights stay bfloat16, norms and
biases become float32. Query and key rows of Llama are interleaved as in llama.cpp's convert_hf_to_gguf.py.
Runs in llama.cpp's environment: gguf, numpy and the standard library.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, file: Path) -> None:
    """Raises ValueError for an architecture or a number format that is not covered."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("llama", "qwen2"):
        raise ValueError(f"{folder}/config.json: model_type {kind!r}; covered: llama, qwen2")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    for source in sorted(folder.glob("*.safetensors")):
        for name, bits in _read(source):
            target, is_vector = _target(name), bits.ndim == 1
            if kind == "llama" and "q_proj" in name:
                bits = _interleave(bits, heads)
            elif kind == "llama" and "k_proj" in name:
                bits = _interleave(bits, kv_heads)
            if is_vector:
                writer.add_tensor(target, (bits.astype(np.uint32) << 16).view(np.float32))
            else:
                raw = np.ascontiguousarray(bits).view(np.uint8)
                writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read(file: Path) -> list[tuple[str, NDArray[np.uint16]]]:
    """Every tensor's bits, in the file's order."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + length)
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{file}: {name} is {entry['dtype']}; covered: BF16")
        start, end = entry["data_offsets"]
        found.append((name, data[start:end].view(np.uint16).reshape(entry["shape"])))
    return found


def _target(name: str) -> str:
    path, _, leaf = name.rpartition(".")
    if path in _OUTER:
        return f"{_OUTER[path]}.{leaf}"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{leaf}"


def _interleave(rows: NDArray[np.uint16], num_heads: int) -> NDArray[np.uint16]:
    """The two halves of every head, row by row in turn; rows is (num_heads * head_dim, ...)."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
