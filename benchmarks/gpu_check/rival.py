"""transformers beside the engine: makes the checkpoints, says what tokens should be, and is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_check.settings import Settings


class Rival:
    """A model of transformers on the device of the check. Its classes carry no types."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model.train(False)
        self._device = device

    @staticmethod
    def of_folder(folder: str, settings: Settings) -> Rival:
        dtype = getattr(torch, settings.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        return Rival(model.to(settings.device), settings.device)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], num_last: int) -> torch.Tensor:
        """(num_last, vocabulary) float32 on the CPU: what the last tokens' successors are given."""
        ids = torch.tensor([token_ids], device=self._device)
        logits = self._model(ids, logits_to_keep=num_last).logits[0]
        found: torch.Tensor = logits.float().log_softmax(-1).cpu()
        return found

    def decode_tokens_per_s(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Of all prompts together, after their first tokens."""
        self._generate(prompts, 2)
        first_s = self._generate(prompts, 1)
        seconds = self._generate(prompts, new_tokens) - first_s
        return len(prompts) * (new_tokens - 1) / max(seconds, 1e-9)

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts, device=self._device)
        started = time.perf_counter()
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        found[0, -1].item()  # waits for the device
        return time.perf_counter() - started


def write_checkpoint(name: str, settings: Settings) -> tuple[str, Rival]:
    """A folder with random weights of one of settings.shapes, and its model."""
    fields = dict(settings.shapes[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(settings.device):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, settings.dtype))
    folder = Path(settings.folder) / name
    model.save_pretrained(folder)
    return str(folder), Rival(model, settings.device)
