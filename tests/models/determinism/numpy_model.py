"""A decoder in numpy, apart from all other code: no cache, every position anew, one sequence, float64.

Covered: what the checkpoints of the grid have. RMS norms, plain rotary embedding, grouped heads, a gated SiLU
MLP, no biases.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float64]


class NumpyModel:
    """A llama checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self._weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def logits(self, token_ids: list[int]) -> Array:
        """(tokens, vocabulary)."""
        config = self._config
        x = self._weights["model.embed_tokens.weight"][token_ids]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = x + self._attention(name + "self_attn.", self._norm(name + "input_layernorm", x))
            x = x + self._mlp(name + "mlp.", self._norm(name + "post_attention_layernorm", x))
        return self._norm("model.norm", x) @ self._weights["lm_head.weight"].T

    def logprobs(self, token_ids: list[int]) -> Array:
        """(tokens, vocabulary)."""
        logits = self.logits(token_ids)
        top = logits.max(axis=1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))

    def _norm(self, name: str, x: Array) -> Array:
        scale = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + self._config["rms_norm_eps"])
        return x * scale * self._weights[f"{name}.weight"]

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self._weights[f"{name}.weight"].T

    def _mlp(self, name: str, x: Array) -> Array:
        gate = self._linear(f"{name}gate_proj", x)
        return self._linear(
            f"{name}down_proj", gate / (1 + np.exp(-gate)) * self._linear(f"{name}up_proj", x)
        )

    def _attention(self, name: str, x: Array) -> Array:
        config, size = self._config, self._config["head_dim"]
        tokens, group = len(x), config["num_attention_heads"] // config["num_key_value_heads"]
        queries = self._turned(self._linear(f"{name}q_proj", x).reshape(tokens, -1, size))
        keys = self._turned(self._linear(f"{name}k_proj", x).reshape(tokens, -1, size))
        values = self._linear(f"{name}v_proj", x).reshape(tokens, -1, size)
        out = np.empty_like(queries)
        for head in range(queries.shape[1]):
            for row in range(tokens):
                scores = keys[: row + 1, head // group] @ queries[row, head] / np.sqrt(size)
                chances = np.exp(scores - scores.max())
                out[row, head] = chances @ values[: row + 1, head // group] / chances.sum()
        return self._linear(f"{name}o_proj", out.reshape(tokens, -1))

    def _turned(self, x: Array) -> Array:
        """x (tokens, heads, size): pairs (i, i + size / 2) turn by their position."""
        tokens, _, size = x.shape
        theta = self._config["rope_parameters"]["rope_theta"]
        angles = np.arange(tokens)[:, None] / theta ** (np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=2)
