"""What transformers says: float32, eager attention, greedy `generate` or one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tests.models.checkpoints import MARGIN


@dataclass(frozen=True)
class Continuation:
    """Greedy ids after a prompt, and the smallest gap between the two best logits on the way."""

    token_ids: list[int]
    margin: float


class Oracle:
    """The reference for one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # `generate` fills what a request leaves open from here, end ids among it.
        self.eos_token_id: int | list[int] | None = self.model.generation_config.eos_token_id
        self.model.generation_config = GenerationConfig()

    def continuation(
        self, prompt: Sequence[int], num_tokens: int, *, eos_token_id: int | list[int] | None = None
    ) -> Continuation:
        """`generate(do_sample=False)`. Ends early at `eos_token_id` only, never at the folder's own."""
        self._forget_dynamic_rotary()
        out = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=_generation_config(num_tokens, eos_token_id),
        )
        best_two = torch.stack(out.logits).float().topk(2, dim=-1).values  # (steps, 1, 2)
        margin = float((best_two[..., 0] - best_two[..., 1]).min())
        return Continuation(out.sequences[0, len(prompt) :].tolist(), margin)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy ids, after checking that no step was a near tie: then exact equality may be asked for."""
        found = self.continuation(prompt, num_tokens)
        assert found.margin >= MARGIN, (
            f"{self._folder.name}: gap {found.margin:.1e} below {MARGIN} after a prompt of {len(prompt)} "
            "tokens; screen another seed with `python -m tests.models.screen`"
        )
        return found.token_ids

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of one forward pass, (tokens, vocabulary)."""
        self._forget_dynamic_rotary()
        return self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first, given those before it."""
        scores = torch.log_softmax(self.logits(token_ids), dim=-1)[:-1]
        targets = torch.tensor(list(token_ids[1:]))
        return scores.gather(1, targets[:, None])[:, 0].tolist()

    def _forget_dynamic_rotary(self) -> None:
        """Dynamic rotary scaling keeps the longest length seen; every call must start as a fresh model."""
        rotary = getattr(getattr(self.model, "model", None), "rotary_emb", None)
        if rotary is not None:
            rotary.inv_freq = rotary.original_inv_freq.clone()
            rotary.max_seq_len_cached = rotary.original_max_seq_len


def _generation_config(num_tokens: int, eos: int | list[int] | None) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
