"""Medusa heads: layers on the last hidden state of a model, each for a token further on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors import safe_open

from workers.kernels import Kernels, PackedLinear, Quantization
from workers.model.errors import CheckpointError
from workers.model.lending import DRAFT_TOKEN_IDS, check_ids
from workers.model.medusa_folder import MedusaFolder, head_names
from workers.model.weights import WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaHeads:
    """The heads, and the part of the model's head that they use."""

    layers: tuple[PackedLinear, ...]  # hidden -> hidden, of each head
    vocabulary: PackedLinear  # hidden -> guessed tokens, float32
    token_ids: tuple[int, ...]  # of its outputs

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """hidden (R, hidden), last states -> (R, num_heads, V') float32, of the first heads."""
        wide = hidden.float()
        moved = [wide + F.silu(layer(hidden).float()) for layer in self.layers[:num_heads]]
        return self.vocabulary(torch.stack(moved, dim=1).to(hidden.dtype))


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
        layers = []
        for i in range(folder.num_heads):
            weight, bias = (stored.get_tensor(name).to(device, dtype) for name in head_names(i))
            if not bool(weight.isfinite().all() and bias.isfinite().all()):
                raise CheckpointError(f"{folder.file}: heads.{i} holds NaN or infinite values")
            try:
                layers.append(kernels.pack_linear(weight, bias, None, form))
            except ValueError as error:
                raise CheckpointError(f"{folder.file}: heads.{i}: {error}") from error
    with WeightReader(folder.model, dtype, device) as reader:
        rows = reader.rows(folder.model.head_name)[ids.to(device)]
    return MedusaHeads(
        layers=tuple(layers),
        vocabulary=kernels.pack_linear(rows, None, torch.float32, form.of_head),
        token_ids=tuple(ids.tolist()),
    )
