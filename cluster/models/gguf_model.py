"""A GGUF file of a Llama-family model, written out as a folder in Hugging Face layout.

GGUF keeps the same model under other names, in blocks of a few bits, and with the rows of the query and key
projections interleaved for llama.cpp's rotary embedding. All three are undone here; weights become bfloat16.
Covered: architecture `llama` with a byte-level BPE tokenizer of the kinds in `_PRE_TOKENIZERS`. Everything
else is refused by name. The file is trusted as far as its hash is pinned by the caller: sizes come from it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WEIGHTS = "model.safetensors"
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
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


class GgufError(ValueError):
    """A GGUF file that cannot be converted. The text names the file's entry and what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """What the metadata of the file says."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    is_tied: bool  # no output.weight: the embedding is the head too
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    unk_token_id: int
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    pre_tokenizer: str
    chat_template: str | None


def write_folder(
    gguf_file: Path, folder: Path, progress: Callable[[str], None], sampling: Mapping[str, Any] | None = None
) -> None:
    """Write config, generation config, tokenizer, chat template and weights into an existing folder.

    `sampling`: what the model's authors recommend, for the generation config; a GGUF does not say.
    Raises GgufError for a file that is not of the covered kind, OSError when the disk refuses.
    """
    progress(f"reading {gguf_file.name}")
    reader = gguf.GGUFReader(gguf_file)
    model = read_model(reader)
    _write_json(folder / "config.json", _config(model))
    _write_json(folder / "generation_config.json", {**_generation_config(model), **(sampling or {})})
    _write_tokenizer(model, folder)
    progress(f"converting {len(reader.tensors)} tensors to bfloat16")
    tensors = {name: to_bfloat16(values) for name, values in _tensors(reader, model)}
    progress(f"writing {WEIGHTS} ({sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB)")
    write_bfloat16(folder / WEIGHTS, tensors)


def read_model(reader: gguf.GGUFReader) -> GgufModel:
    """The metadata, or GgufError naming the entry that is missing or not covered."""
    architecture = _entry(reader, "general.architecture")
    if architecture != "llama":
        raise GgufError(f"general.architecture is {architecture!r}; covered: llama")
    if (kind := _entry(reader, "tokenizer.ggml.model")) != "gpt2":
        raise GgufError(f"tokenizer.ggml.model is {kind!r}; covered: gpt2 (byte-level BPE)")
    pre_tokenizer = _entry(reader, "tokenizer.ggml.pre")
    if pre_tokenizer not in _PRE_TOKENIZERS:
        raise GgufError(
            f"tokenizer.ggml.pre is {pre_tokenizer!r}; covered: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    tokens = tuple(_entry(reader, "tokenizer.ggml.tokens"))
    num_heads = int(_entry(reader, "llama.attention.head_count"))
    hidden_size = int(_entry(reader, "llama.embedding_length"))
    eos = int(_entry(reader, "tokenizer.ggml.eos_token_id"))
    return GgufModel(
        vocab_size=len(tokens),
        hidden_size=hidden_size,
        num_layers=int(_entry(reader, "llama.block_count")),
        num_heads=num_heads,
        num_kv_heads=int(_entry(reader, "llama.attention.head_count_kv", num_heads)),
        intermediate_size=int(_entry(reader, "llama.feed_forward_length")),
        head_dim=int(_entry(reader, "llama.rope.dimension_count", hidden_size // num_heads)),
        max_positions=int(_entry(reader, "llama.context_length")),
        rope_theta=float(_entry(reader, "llama.rope.freq_base", 10000.0)),
        # Stored as float32: 1e-5 comes back as 9.999999747378752e-06. Seven digits are what it holds.
        rms_norm_eps=float(f"{_entry(reader, 'llama.attention.layer_norm_rms_epsilon'):.7g}"),
        is_tied=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=int(_entry(reader, "tokenizer.ggml.bos_token_id")),
        eos_token_id=eos,
        pad_token_id=int(_entry(reader, "tokenizer.ggml.padding_token_id", eos)),
        unk_token_id=int(_entry(reader, "tokenizer.ggml.unknown_token_id", eos)),
        tokens=tokens,
        token_types=tuple(_entry(reader, "tokenizer.ggml.token_type")),
        merges=tuple(_entry(reader, "tokenizer.ggml.merges")),
        pre_tokenizer=pre_tokenizer,
        chat_template=_entry(reader, "tokenizer.chat_template", ""),
    )


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even, as torch rounds. Same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_bfloat16(file: Path, tensors: Mapping[str, NDArray[np.uint16]]) -> None:
    """A safetensors file of bfloat16 tensors given as bits: header length, JSON header, data, in name order.

    By hand, because numpy has no bfloat16 for safetensors.numpy to name, and torch takes seconds to import.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            stream.write(np.ascontiguousarray(tensors[name], dtype="<u2").data)


def undo_permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of a query or key projection in Hugging Face's order; weight is (num_heads * head_dim, hidden).

    GGUF interleaves the two halves of each head (row 2i and 2i + 1 rotate together); Hugging Face keeps
    them apart (row i and i + head_dim / 2). The inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _entry(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    if field is None:
        if default is None:
            raise GgufError(f"the file has no entry {key}")
        return default
    return field.contents()


def _tensors(reader: gguf.GGUFReader, model: GgufModel) -> list[tuple[str, NDArray[np.float32]]]:
    """Every tensor under its Hugging Face name, float32."""
    tensors = []
    for tensor in reader.tensors:
        name, kind = _name(tensor.name, model.num_layers)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if kind == "attn_q":
            values = undo_permute(values, model.num_heads)
        elif kind == "attn_k":
            values = undo_permute(values, model.num_kv_heads)
        if not np.isfinite(values).all():
            raise GgufError(f"tensor {tensor.name} holds values that are not finite")
        tensors.append((name, values))
    expected = model.num_layers * len(_BLOCK_NAMES) + (2 if model.is_tied else 3)
    if len(tensors) != expected:
        raise GgufError(f"the file has {len(tensors)} tensors; its metadata asks for {expected}")
    return tensors


def _name(gguf_name: str, num_layers: int) -> tuple[str, str]:
    """Hugging Face's name of a tensor, and its kind inside a block."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name], ""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None or match[2] not in _BLOCK_NAMES or int(match[1]) >= num_layers:
        raise GgufError(f"tensor {gguf_name} is not part of a Llama model of {num_layers} layers")
    return f"model.layers.{int(match[1])}.{_BLOCK_NAMES[match[2]]}.weight", match[2]


def _config(model: GgufModel) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.is_tied,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
    }


def _generation_config(model: GgufModel) -> dict[str, Any]:
    return {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
    }


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Each digit alone, then GPT-2's split into words."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"smollm": _smollm_pre_tokenizer}


def _write_tokenizer(model: GgufModel, folder: Path) -> None:
    pairs = [merge.split(" ") for merge in model.merges]
    vocab = {token: index for index, token in enumerate(model.tokens)}
    if len(vocab) != len(model.tokens) or any(len(pair) != 2 for pair in pairs):
        raise GgufError("tokenizer.ggml.tokens holds a token twice, or a merge is not a pair")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(a, b) for a, b in pairs]))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[model.pre_tokenizer]()
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(model.tokens, model.token_types, strict=True) if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    # What its own `save` writes, but with Python's errors: a full disk is an OSError.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    names = {
        "bos_token": model.tokens[model.bos_token_id],
        "eos_token": model.tokens[model.eos_token_id],
        "pad_token": model.tokens[model.pad_token_id],
        "unk_token": model.tokens[model.unk_token_id],
    }
    config = {
        # The generic class: it takes tokenizer.json as it is, where GPT2Tokenizer rebuilds its splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", names)
    if model.chat_template:
        (folder / "chat_template.jinja").write_text(model.chat_template, encoding="utf-8")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
