"""A model of Qwen2-0.5B's shape with random weights, for speed only: nothing to download, nothing to say.

    python -m benchmarks.random_model      # prints its folder; made once, 0.8 GB in ~/.cache/tandem/models

Hidden 896, 24 layers, 14 heads on 2 key-value heads, MLP 4864, biases on query, key and value, 49152 tied
embeddings: 402 million weights in bfloat16. The tokenizer is the embedded model's.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

from cluster.models.embedded import default_root, ensure

NAME = "random-qwen2-0.5b"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def random_model(root: Path) -> Path:
    """The folder, made when absent: complete or not there."""
    folder = root / NAME
    if folder.is_dir():
        return folder
    tokenizer = ensure(Console(stderr=True).print)
    temporary = root / f".{NAME}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=49152,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(temporary)
    for name in _TOKENIZER_FILES:
        if (source := tokenizer / name).exists():
            shutil.copy(source, temporary / name)
    temporary.rename(folder)
    return folder


if __name__ == "__main__":
    sys.stdout.write(f"{random_model(default_root())}\n")
