"""A GGUF file of a tiny Llama, as llama.cpp's converter writes it, and the weights it was made from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from cluster.models.embedded import ModelSource
from cluster.models.manifest import sha256_file

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
_KINDS = gguf.GGMLQuantizationType

# gguf name, Hugging Face name, shape, stored as
_LAYER = (
    ("attn_norm", "input_layernorm", (HIDDEN,), _KINDS.F32),
    ("attn_q", "self_attn.q_proj", (HIDDEN, HIDDEN), _KINDS.Q4_1),
    ("attn_k", "self_attn.k_proj", (HIDDEN // 2, HIDDEN), _KINDS.Q8_0),
    ("attn_v", "self_attn.v_proj", (HIDDEN // 2, HIDDEN), _KINDS.Q4_1),
    ("attn_output", "self_attn.o_proj", (HIDDEN, HIDDEN), _KINDS.F32),
    ("ffn_norm", "post_attention_layernorm", (HIDDEN,), _KINDS.F32),
    ("ffn_gate", "mlp.gate_proj", (INNER, HIDDEN), _KINDS.Q4_1),
    ("ffn_up", "mlp.up_proj", (INNER, HIDDEN), _KINDS.Q8_0),
    ("ffn_down", "mlp.down_proj", (HIDDEN, INNER), _KINDS.Q4_1),
)


def tokens() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary of printable ASCII and the merges ("h", "i") and ("\u0120", "hi")."""
    single = [chr(code) for code in range(33, 127)] + ["\u0120"]  # the last is a space in byte-level text
    return [*SPECIAL, *single, "hi", "\u0120hi"], ["h i", "\u0120 hi"]


# Beside those: of Qwen2 and Qwen3.
_MORE = {
    "qwen2": tuple(
        (f"attn_{letter}", f"self_attn.{letter}_proj", (rows,), _KINDS.F32)
        for letter, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2))
    ),
    "qwen3": tuple(
        (f"attn_{letter}_norm", f"self_attn.{letter}_norm", (HIDDEN // HEADS,), _KINDS.F32)
        for letter in ("q", "k")
    ),
}


def write_tiny_gguf(
    file: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    kind: gguf.GGMLQuantizationType | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Write the file and give its weights under Hugging Face's names, as they are after quantisation.

    kind: of all matrices; None: several.
    """
    random = np.random.default_rng(7)
    vocab, merges = tokens()
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocab) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    entries = [
        ("token_embd.weight", "model.embed_tokens.weight", (len(vocab), HIDDEN), _KINDS.Q8_0),
        ("output_norm.weight", "model.norm.weight", (HIDDEN,), _KINDS.F32),
    ]
    for layer in range(LAYERS):
        entries += [
            (f"blk.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight", shape, kind)
            for ours, theirs, shape, kind in _LAYER
        ]
        ending = "bias" if architecture == "qwen2" else "weight"
        entries += [
            (f"blk.{layer}.{ours}.{ending}", f"model.layers.{layer}.{theirs}.{ending}", shape, stored)
            for ours, theirs, shape, stored in _MORE.get(architecture, ())
        ]
    weights = {}
    for gguf_name, name, shape, own_kind in entries:
        used = own_kind if kind is None or len(shape) == 1 else kind
        values = random.standard_normal(shape).astype(np.float32)
        stored = values
        if architecture == "llama" and ".attn_q." in gguf_name:
            stored = _permute(values, HEADS)
        elif architecture == "llama" and ".attn_k." in gguf_name:
            stored = _permute(values, KV_HEADS)
        # Blocks of 32 run along a row, so moving rows and quantising may be done in either order.
        writer.add_tensor(gguf_name, gguf.quants.quantize(stored, used), raw_dtype=used)
        weights[name] = gguf.quants.dequantize(gguf.quants.quantize(values, used), used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def tiny_source(file: Path) -> ModelSource:
    """The file as an embedded model."""
    return ModelSource(
        name="Tiny",
        requirement="tiny==1.0",
        package="tiny_package_that_does_not_exist",
        file=file.name,
        sha256=sha256_file(file),
        summary="GGUF, small",
        sampling={"do_sample": True, "temperature": 0.25},
    )


def _permute(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)
