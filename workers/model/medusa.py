"""Medusa heads: layers on the last hidden state of a model and the tokens after it, each for one more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import torch
import torch.nn.functional as F
from safetensors import safe_open

from workers.kernels import (
    GUESS_BRANCHES,
    MAX_LOGIT_ROWS,
    FusedGuesses,
    GuessedTokens,
    GuessHead,
    GuessModel,
    GuessTask,
    Kernels,
    Quantization,
)
from workers.model.errors import CheckpointError
from workers.model.lending import DRAFT_TOKEN_IDS, check_ids
from workers.model.medusa_folder import MedusaFolder, head_names
from workers.model.weights import WeightReader


@dataclass(frozen=True)
class MedusaHeads:
    """Implements `workers.kernels.FusedGuesses`, by one call where there is one for these heads."""

    model: GuessModel
    fused: FusedGuesses | None = None

    @torch.inference_mode()
    def __call__(
        self, hidden: torch.Tensor, tasks: Sequence[GuessTask], least: float
    ) -> list[list[GuessedTokens] | None]:
        if self.fused is not None:
            return self.fused(hidden, tasks, least)
        found: list[list[GuessedTokens] | None] = [[] for _ in tasks]
        scores: list[list[float]] = [[] for _ in tasks]  # of all that was found, with what it follows
        states = rows_of(hidden, [task.row for task in tasks])
        going_on = [(number, task.token_id, 0.0) for number, task in enumerate(tasks)]
        for head in self.model.heads:
            states = self._moved(head, states, [token_id for _, token_id, _ in going_on])
            asked, going_on, kept = going_on, [], []
            for row, ((number, _, before), tokens) in enumerate(zip(asked, self._best(states), strict=True)):
                levels, task = found[number], tasks[number]
                if levels is None or not isfinite(tokens[0][1]):
                    found[number] = None
                    continue
                levels.append(tokens)
                scores[number] += (before + score for _, score in (tokens[:1] if task.is_chain else tokens))
                best = before + tokens[0][1]
                if best >= least and sum(score >= best for score in scores[number]) < task.num_tokens:
                    going_on.append((number, tokens[0][0], best))
                    kept.append(row)
            if not going_on:
                break
            states = rows_of(states, kept)
        return found

    def _moved(self, head: GuessHead, states: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """states (R, hidden), each with the token that came after it -> (R, hidden), one place further on."""
        unknown = len(self.model.token_ids)
        places = [self._places.get(token_id, unknown) for token_id in token_ids]
        wide = F.silu(head.state(states).add_(rows_of(head.tokens, places)), inplace=True)
        return head.out(wide.to(states.dtype)).add_(states).to(states.dtype)

    def _best(self, states: torch.Tensor) -> list[GuessedTokens]:
        """Of each row the likeliest tokens, best first, with the logarithm of how likely they are."""
        ids, found = self.model.token_ids, []
        for rows in torch.split(states, MAX_LOGIT_ROWS):
            logits = self.model.vocabulary(rows)
            best, places = logits.topk(min(GUESS_BRANCHES, len(ids)))
            best -= logits.logsumexp(-1, keepdim=True)
            for scores, where in zip(best.tolist(), places.tolist(), strict=True):
                found.append([(ids[place], score) for place, score in zip(where, scores, strict=True)])
        return found

    @cached_property
    def _places(self) -> dict[int, int]:
        return {token_id: place for place, token_id in enumerate(self.model.token_ids)}


def load_heads(
    folder: MedusaFolder,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = Quantization.NONE,
) -> MedusaHeads:
    """Reads and packs all of it, with the rows of the model's head that the guessed tokens have.

    quantization: as of the model's linear layers; AUTO: none. Where that is none, products on CPUs have int8
    weights all the same: a guess that is nearly the best will do, and half of the bytes are read (where the
    kernels have products of int8; elsewhere such weights are read as bf16). Raises
    CheckpointError for ids out of order and values that are not finite or not in the range of `quantization`.
    """
    form = Quantization.NONE if quantization is Quantization.AUTO else quantization
    if form is Quantization.NONE and device.type == "cpu" and dtype is torch.bfloat16:
        form = Quantization.INT8
    with safe_open(str(folder.file), framework="pt", device="cpu") as stored:
        ids: torch.Tensor = stored.get_tensor(DRAFT_TOKEN_IDS).long()
        check_ids(folder.file, ids.tolist(), folder.model.vocab_size)
        parts = [
            tuple(stored.get_tensor(name).to(device, dtype) for name in head_names(i))
            for i in range(folder.num_heads)
        ]
    with WeightReader(folder.model, dtype, device) as reader:
        rows = reader.rows(folder.model.head_name)[ids.to(device)]
    inputs, heads = token_inputs(rows), []
    for i, (weight, bias, out) in enumerate(parts):
        if not all(bool(each.isfinite().all()) for each in (weight, bias, out)):
            raise CheckpointError(f"{folder.file}: heads.{i} holds NaN or infinite values")
        of_state, of_token = weight.chunk(2, dim=1)
        try:
            state, moved = (
                kernels.pack_linear(each.contiguous(), None, torch.float32, form) for each in (of_state, out)
            )
        except ValueError as error:
            raise CheckpointError(f"{folder.file}: heads.{i}: {error}") from error
        heads.append(GuessHead(state=state, tokens=F.linear(inputs, of_token, bias), out=moved))
    model = GuessModel(
        heads=tuple(heads),
        vocabulary=kernels.pack_linear(rows, None, torch.float32, form.of_head),
        token_ids=tuple(ids.tolist()),
        vocab_size=folder.model.vocab_size,
    )
    return MedusaHeads(model, kernels.fuse_guesses(model))


def rows_of(x: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Rows of x (.., hidden): a view of one, as an index takes torch as long as many a layer."""
    if len(places) == 1:
        return x[places[0] : places[0] + 1]
    return x if list(places) == list(range(len(x))) else x[list(places)]


def token_inputs(rows: torch.Tensor) -> torch.Tensor:
    """rows (V', hidden) of the model's head -> (V' + 1, hidden), what heads are told of the token before."""
    wide = rows.float()
    found = wide / wide.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
    return F.pad(found, (0, 0, 0, 1)).to(rows.dtype)
