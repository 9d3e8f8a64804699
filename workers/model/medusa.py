"""Medusa heads: layers on the last hidden state of a model and the tokens after it, each for one more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from safetensors import safe_open

from workers.kernels import MAX_LOGIT_ROWS, Kernels, PackedLinear, Quantization
from workers.model.errors import CheckpointError
from workers.model.lending import DRAFT_TOKEN_IDS, check_ids
from workers.model.medusa_folder import MedusaFolder, head_names
from workers.model.weights import WeightReader


@dataclass(frozen=True, kw_only=True)
class MedusaHeads:
    """The heads, and the part of the model's head that they use."""

    layers: tuple[PackedLinear, ...]  # state -> hidden in float32, of each head
    # Of each head what the token before adds to its layer, (V' + 1, hidden): each guessed token, and any
    # other.
    tokens: tuple[torch.Tensor, ...]
    vocabulary: PackedLinear  # hidden -> guessed tokens, float32
    token_ids: tuple[int, ...]  # of its outputs

    @torch.inference_mode()
    def moved(self, head: int, states: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """states (R, hidden), each with the token that came after it -> (R, hidden), one place further on."""
        unknown = len(self.token_ids)
        places = [self._places.get(token_id, unknown) for token_id in token_ids]
        wide = self.layers[head](states).add_(rows_of(self.tokens[head], places))
        return F.silu(wide, inplace=True).add_(states).to(states.dtype)

    @torch.inference_mode()
    def best(self, states: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
        """Of each row the likeliest tokens, best first, with the logarithm of how likely they are."""
        ids, found = self.token_ids, []
        for rows in torch.split(states, MAX_LOGIT_ROWS):
            logits = self.vocabulary(rows)
            best, places = logits.topk(min(count, len(ids)))
            best -= logits.logsumexp(-1, keepdim=True)
            for scores, where in zip(best.tolist(), places.tolist(), strict=True):
                found.append([(ids[place], score) for place, score in zip(where, scores, strict=True)])
        return found

    @cached_property
    def _places(self) -> dict[int, int]:
        return {token_id: place for place, token_id in enumerate(self.token_ids)}


def load_heads(
    folder: MedusaFolder,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = Quantization.NONE,
) -> MedusaHeads:
    """Reads and packs all of it, with the rows of the model's head that the guessed tokens have.

    quantization: as of the model's linear layers; AUTO: none. Raises CheckpointError for ids out of order and
    values that are not finite or not in the range of `quantization`.
    """
    form = Quantization.NONE if quantization is Quantization.AUTO else quantization
    with safe_open(str(folder.file), framework="pt", device="cpu") as stored:
        ids: torch.Tensor = stored.get_tensor(DRAFT_TOKEN_IDS).long()
        check_ids(folder.file, ids.tolist(), folder.model.vocab_size)
        parts = [
            tuple(stored.get_tensor(name).to(device, dtype) for name in head_names(i))
            for i in range(folder.num_heads)
        ]
    with WeightReader(folder.model, dtype, device) as reader:
        rows = reader.rows(folder.model.head_name)[ids.to(device)]
    inputs, layers, tokens = token_inputs(rows), [], []
    for i, (weight, bias) in enumerate(parts):
        if not bool(weight.isfinite().all() and bias.isfinite().all()):
            raise CheckpointError(f"{folder.file}: heads.{i} holds NaN or infinite values")
        of_state, of_token = weight.chunk(2, dim=1)
        try:
            layers.append(kernels.pack_linear(of_state.contiguous(), None, torch.float32, form))
        except ValueError as error:
            raise CheckpointError(f"{folder.file}: heads.{i}: {error}") from error
        tokens.append(F.linear(inputs, of_token, bias))
    return MedusaHeads(
        layers=tuple(layers),
        tokens=tuple(tokens),
        vocabulary=kernels.pack_linear(rows, None, torch.float32, form.of_head),
        token_ids=tuple(ids.tolist()),
    )


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
