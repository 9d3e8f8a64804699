"""The sizes of the check: those of a GPU, and tiny ones for a dry run on the CPU."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

# Of transformers' LlamaConfig and MistralConfig; Llama's positions go further than trained, for prompts of
# 8,192 tokens.
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 8448,
}
_MISTRAL: dict[str, Any] = _LLAMA | {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_hidden_layers": 8,  # a quarter: the same kernels, in time
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all parts are told."""

    is_dry: bool
    folder: str  # for checkpoints; empty at the start
    model: str = ""  # folder of a checkpoint to compare as well

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    @property
    def dtype(self) -> str:
        return "float32" if self.is_dry else "bfloat16"

    @property
    def shapes(self) -> dict[str, dict[str, Any]]:
        """Fields of the configurations, by name. `short`: two layers, for what needs no whole model."""
        llama = _LLAMA | _TINY if self.is_dry else _LLAMA
        mistral = _MISTRAL | _TINY | {"sliding_window": 16} if self.is_dry else _MISTRAL
        return {"llama": llama, "mistral": mistral, "short": llama | {"num_hidden_layers": 2}}

    @property
    def compared_prompts(self) -> tuple[int, ...]:
        """Lengths in tokens, around blocks, splits and the sliding window."""
        return (1, 17, 40) if self.is_dry else (1, 17, 255, 600, 1500, 5000)

    @property
    def compared_tokens(self) -> int:
        """New tokens of each."""
        return 6 if self.is_dry else 24

    @property
    def tolerance(self) -> float:
        """Of a log-probability against transformers'."""
        return 1e-3 if self.is_dry else 0.15

    @property
    def batches(self) -> tuple[int, ...]:
        return (1, 3) if self.is_dry else (1, 8, 32, 64, 128)

    @property
    def decode_prompt(self) -> int:
        return 16 if self.is_dry else 512

    @property
    def decode_tokens(self) -> int:
        return 8 if self.is_dry else 256

    @property
    def prefills(self) -> tuple[int, ...]:
        return (32, 64) if self.is_dry else (512, 2048, 8192)

    @property
    def rival_batches(self) -> tuple[int, ...]:
        """Where transformers is measured too."""
        return (1, 3) if self.is_dry else (1, 8, 32)

    @property
    def rival_tokens(self) -> int:
        return 4 if self.is_dry else 48

    @property
    def max_step_tokens(self) -> int:
        return 64 if self.is_dry else 8192

    @property
    def step_timeout_s(self) -> float:
        """For ranks that are killed or stopped."""
        return 4.0 if self.is_dry else 10.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        return Settings(**json.loads(text))
