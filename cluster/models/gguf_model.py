"""A GGUF file of a Llama-like model, written out as a folder in Hugging Face layout.

GGUF keeps the same model under other names, in blocks of a few bits, and of Llama with the rows of the query
and key projections interleaved for llama.cpp's rotary embedding. All three are undone here; weights become
bfloat16, one tensor in memory at a time. Covered: the architectures of `gguf_names` with a byte-level BPE
tokenizer of the kinds in `gguf_splitting`. Everything else is refused by name. The file is trusted as far as
the caller trusts it: sizes come from it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from cluster.models.gguf_names import ARCHITECTURES, GgufArchitecture
from cluster.models.gguf_splitting import SPLITTINGS

WEIGHTS = "model.safetensors"
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class GgufError(ValueError):
    """A GGUF file that cannot be converted. The text names the file's entry and what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """What the metadata of the file says."""

    architecture: GgufArchitecture
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
    adds_bos: bool  # to every text
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
    tensors = _tensors(reader, model)
    size = sum(2 * int(tensor.n_elements) for tensor, _ in tensors.values())
    progress(f"writing {WEIGHTS} ({size / 1e6:.0f} MB)")
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, (tensor, _) in tensors.items()}
    write_bfloat16(folder / WEIGHTS, shapes, lambda name: to_bfloat16(_values(*tensors[name], model)))


def read_model(reader: gguf.GGUFReader) -> GgufModel:
    """The metadata, or GgufError naming the entry that is missing or not covered."""
    name = _entry(reader, "general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise GgufError(f"general.architecture is {name!r}; covered: {', '.join(ARCHITECTURES)}")
    if (kind := _entry(reader, "tokenizer.ggml.model")) != "gpt2":
        raise GgufError(f"tokenizer.ggml.model is {kind!r}; covered: gpt2 (byte-level BPE)")
    pre_tokenizer = _entry(reader, "tokenizer.ggml.pre")
    if pre_tokenizer not in SPLITTINGS:
        raise GgufError(f"tokenizer.ggml.pre is {pre_tokenizer!r}; covered: {', '.join(sorted(SPLITTINGS))}")
    if (scaling := _entry(reader, f"{name}.rope.scaling.type", "none")) != "none":
        raise GgufError(f"{name}.rope.scaling.type is {scaling!r}; covered: none")
    tokens = tuple(_entry(reader, "tokenizer.ggml.tokens"))
    num_heads = int(_entry(reader, f"{name}.attention.head_count"))
    hidden_size = int(_entry(reader, f"{name}.embedding_length"))
    head_dim = int(_entry(reader, f"{name}.rope.dimension_count", hidden_size // num_heads))
    eos = int(_entry(reader, "tokenizer.ggml.eos_token_id"))
    return GgufModel(
        architecture=architecture,
        vocab_size=len(tokens),
        hidden_size=hidden_size,
        num_layers=int(_entry(reader, f"{name}.block_count")),
        num_heads=num_heads,
        num_kv_heads=int(_entry(reader, f"{name}.attention.head_count_kv", num_heads)),
        intermediate_size=int(_entry(reader, f"{name}.feed_forward_length")),
        head_dim=int(_entry(reader, f"{name}.attention.key_length", head_dim)),
        max_positions=int(_entry(reader, f"{name}.context_length")),
        rope_theta=float(_entry(reader, f"{name}.rope.freq_base", 10000.0)),
        # Stored as float32: 1e-5 comes back as 9.999999747378752e-06. Seven digits are what it holds.
        rms_norm_eps=float(f"{_entry(reader, f'{name}.attention.layer_norm_rms_epsilon'):.7g}"),
        is_tied=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=int(_entry(reader, "tokenizer.ggml.bos_token_id", eos)),
        adds_bos=bool(_entry(reader, "tokenizer.ggml.add_bos_token", False)),
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


def write_bfloat16(
    file: Path, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], NDArray[np.uint16]]
) -> None:
    """A safetensors file of bfloat16 tensors given as bits: header length, JSON header, data, in name order.

    values: asked for one tensor after the other. By hand, because numpy has no bfloat16 for safetensors.numpy
    to name, and torch takes seconds to import.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + 2 * math.prod(shapes[name])
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(shapes):
            stream.write(np.ascontiguousarray(values(name), dtype="<u2").data)


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


def _tensors(reader: gguf.GGUFReader, model: GgufModel) -> dict[str, tuple[gguf.ReaderTensor, str]]:
    """Every tensor with its kind inside a layer, under its Hugging Face name."""
    architecture, tensors = model.architecture, {}
    for tensor in reader.tensors:
        found = architecture.hugging_face_name(tensor.name, model.num_layers)
        if found is None:
            raise GgufError(
                f"tensor {tensor.name} is not part of {architecture.name} with {model.num_layers} layers"
            )
        tensors[found[0]] = (tensor, found[1])
    expected = architecture.num_tensors(model.num_layers, is_tied=model.is_tied)
    if len(tensors) != expected:
        raise GgufError(f"the file has {len(tensors)} tensors; its metadata asks for {expected}")
    return tensors


def _values(tensor: gguf.ReaderTensor, kind: str, model: GgufModel) -> NDArray[np.float32]:
    """In Hugging Face's order of rows."""
    try:
        values: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise GgufError(f"tensor {tensor.name} is stored as {tensor.tensor_type.name}: {error}") from error
    if model.architecture.is_interleaved and kind in ("attn_q", "attn_k"):
        values = undo_permute(values, model.num_heads if kind == "attn_q" else model.num_kv_heads)
    if not np.isfinite(values).all():
        raise GgufError(f"tensor {tensor.name} holds values that are not finite")
    return values


def _config(model: GgufModel) -> dict[str, Any]:
    return {
        "architectures": [model.architecture.model_class],
        "model_type": model.architecture.name,
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


def _write_tokenizer(model: GgufModel, folder: Path) -> None:
    pairs = [merge.split(" ") for merge in model.merges]
    vocab = {token: index for index, token in enumerate(model.tokens)}
    if len(vocab) != len(model.tokens) or any(len(pair) != 2 for pair in pairs):
        raise GgufError("tokenizer.ggml.tokens holds a token twice, or a merge is not a pair")
    splitting = SPLITTINGS[model.pre_tokenizer]
    merges = [(a, b) for a, b in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignores_merges))
    if splitting.normalizer is not None:
        tokenizer.normalizer = splitting.normalizer()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    if model.adds_bos:
        bos = model.tokens[model.bos_token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, model.bos_token_id)]
        )
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
