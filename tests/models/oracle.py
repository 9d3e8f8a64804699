"""What transformers says: float32, eager attention, greedy `generate` or one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from tests.models.checkpoints import MARGIN
from workers.types import BeamParams


@dataclass(frozen=True)
class Continuation:
    """Greedy ids after a prompt, and the smallest gap between the two best logits on the way."""

    token_ids: list[int]
    margin: float


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """What a beam search may have beside its parameters."""

    eos: tuple[int, ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class _Bias(LogitsProcessor):
    """Added after all penalties, as OpenAI's API has it."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._bias = bias

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        for token_id, bias in self._bias:
            scores[:, token_id] += bias
        return scores


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

    def beams(
        self, prompt: Sequence[int], num_tokens: int, beam: BeamParams, options: BeamOptions
    ) -> list[tuple[list[int], float | None]]:
        """Tokens and score of all hypotheses of `generate(num_beams=...)`, best first; of width 1, which is
        greedy there, the one without a score."""
        self._forget_dynamic_rotary()
        config = _generation_config(num_tokens, list(options.eos) or None)
        config.update(
            num_beams=beam.width,
            num_return_sequences=beam.width,
            length_penalty=beam.length_penalty,
            early_stopping={"yes": True, "no": False, "never": "never"}[beam.early_stopping.value],
            min_new_tokens=options.min_tokens or None,
            repetition_penalty=options.repetition_penalty,
            output_logits=False,
            output_scores=True,
        )
        out = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=config,
            logits_processor=LogitsProcessorList([_Bias(options.logit_bias)]),
        )
        found = out.sequences[:, len(prompt) :].tolist()
        if beam.width == 1:
            return [(found[0], None)]
        lengths = (out.beam_indices >= 0).sum(-1).tolist()
        return [
            (tokens[:length], score)
            for tokens, length, score in zip(found, lengths, out.sequences_scores.tolist(), strict=True)
        ]

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

    def routing_margins(self, token_ids: Sequence[int]) -> torch.Tensor:
        """How far the last expert that a token takes is ahead of the first that it leaves, (tokens,).

        In the router's logits, the smallest over the layers; infinite for a decoder without experts.
        """
        if not hasattr(self.model.config, "num_experts_per_tok"):
            return torch.full((len(token_ids),), torch.inf)
        taken = self.model.config.num_experts_per_tok
        out = self.model(torch.tensor([list(token_ids)]), use_cache=False, output_router_logits=True)
        best = torch.stack(out.router_logits).topk(taken + 1, dim=-1).values  # (layers, tokens, taken + 1)
        return (best[..., -2] - best[..., -1]).amin(dim=0)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first, given those before it."""
        scores = torch.log_softmax(self.logits(token_ids), dim=-1)[:-1]
        targets = torch.tensor(list(token_ids[1:]))
        return scores.gather(1, targets[:, None])[:, 0].tolist()

    def _forget_dynamic_rotary(self) -> None:
        """Dynamic rotary scaling keeps the longest length seen; every call must start as a fresh model."""
        rotary = getattr(getattr(self.model, "model", None), "rotary_emb", None)
        if hasattr(rotary, "original_inv_freq"):
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
