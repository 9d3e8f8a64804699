"""Folders of draft models for tests: made from the checkpoint of a family, or at random."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from tests.models import checkpoints

SHARED = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def random_draft(folder: Path, *, seed: int = 5, hidden_size: int = 64, vocab_size: int = 128) -> Path:
    """One layer at random, with an embedding, norm and head of its own."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    checkpoints.perturb(model, seed)
    return checkpoints.save(folder, model)


def without_shared(source: Path, folder: Path, names: Sequence[str] = SHARED) -> Path:
    """The same without some tensors, which the served model lends."""
    AutoConfig.from_pretrained(source).save_pretrained(folder)
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_token_ids(source: Path, folder: Path, ids: Sequence[int], dtype: torch.dtype = torch.int32) -> Path:
    """The same, guessing only these tokens."""
    without_shared(source, folder, ())
    tensors = load_file(folder / "model.safetensors")
    tensors["draft_token_ids"] = torch.tensor(ids, dtype=dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def medusa_heads(
    folder: Path,
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    ids: Sequence[int] = range(128),
    hidden_size: int = 64,
    vocab_size: int = 128,
    **config: object,
) -> Path:
    """Heads with these weights and biases, of as many inner units as hidden ones, guessing `ids`."""
    folder.mkdir()
    values = {
        "model_type": "tandem_medusa",
        "hidden_size": hidden_size,
        "inner_size": hidden_size,
        "num_heads": len(weights),
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    tensors = {"draft_token_ids": torch.tensor(list(ids), dtype=torch.int32)}
    names = ("weight", "bias", "out")
    for number, (weight, bias) in enumerate(weights):
        out = torch.eye(hidden_size, dtype=weight.dtype)
        tensors |= {f"heads.{number}.{name}": x for name, x in zip(names, (weight, bias, out), strict=True)}
    save_file(tensors, folder / "heads.safetensors")
    return folder


def random_heads(folder: Path, num_heads: int = 3, **options: object) -> Path:
    """Of a model of hidden size 64; they guess two tokens of three."""
    generator = torch.Generator().manual_seed(11)
    weights = [
        (torch.randn(64, 128, generator=generator) / 8, torch.randn(64, generator=generator) / 8)
        for _ in range(num_heads)
    ]
    return medusa_heads(folder, weights, ids=[i for i in range(128) if i % 3], **options)


def knowing_heads(folder: Path, perm: Sequence[int], embedding: torch.Tensor, num_heads: int) -> Path:
    """Heads of a `checkpoints.successor` that are always right. embedding: (len(perm), hidden), unit rows."""
    inverse = torch.linalg.pinv(embedding)  # embedding @ inverse is the identity
    # What says a token becomes what says the one after it.
    weight = 8 * (inverse @ embedding[torch.tensor(perm)]).T
    weights = []
    for number in range(num_heads):  # each says it louder than what it goes on from
        both = torch.cat((torch.zeros_like(weight), 4**number * weight), dim=1)
        weights.append((both, torch.zeros(len(weight))))
    size = embedding.shape[1]
    return medusa_heads(folder, weights, ids=range(len(perm)), hidden_size=size, vocab_size=len(perm))
