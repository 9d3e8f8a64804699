"""The model that a plan is for: a folder, a config.json, or one of the names known here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cluster.config.tree import EMBEDDED_MODEL
from cluster.models.embedded import SMOLLM2, canonical_path, model_folder
from cluster.plan.arithmetic import active_parameters, num_parameters
from workers.model.architecture import ModelSpec
from workers.model.checkpoint import Checkpoint
from workers.model.files import read_json
from workers.model.spec import spec_from_config
from workers.weight_forms import Quantization, WeightForms

# Published configs, as far as memory and speed depend on them.
_LLAMA_2_7B: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_MISTRAL_7B: dict[str, object] = {  # v0.1, with its sliding window
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_SMOLLM2_135M: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_MIXTRAL_8X7B: dict[str, object] = {
    **_MISTRAL_7B,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
REFERENCES = {
    "llama-2-7b": _LLAMA_2_7B,
    "mistral-7b": _MISTRAL_7B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "smollm2-135m": _SMOLLM2_135M,
}
_EMBEDDED_NAMES = (EMBEDDED_MODEL, "smollm2-135m")


class UnknownModel(ValueError):
    """Nothing is known under this name. The text lists what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """What is known of the model."""

    name: str
    spec: ModelSpec
    is_tied: bool  # the head is the embedding
    path: str | None  # for `model.path` of a deployment; None: no folder is known
    checkpoint: Checkpoint | None  # its weights, where there are any

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.spec, is_tied=self.is_tied)

    @property
    def active_parameters(self) -> int:
        """That a token goes through: of the experts of a layer only some."""
        return active_parameters(self.spec, is_tied=self.is_tied)

    def quantization(self, setting: str) -> str:
        """`model.quantization`, without `auto` where that is the same as `none`."""
        if self.checkpoint is None:
            return "none" if setting == "auto" else setting
        return self.checkpoint.quantization(setting)

    def forms(self, setting: str, dtype: str) -> WeightForms:
        """What that makes of the model, computing in `dtype`."""
        if self.checkpoint is None:
            return WeightForms.made(Quantization(self.quantization(setting)))
        return self.checkpoint.forms(setting, dtype)

    def model_hash(self, quantization: str) -> str | None:
        """Under which a calibration is kept; None without weights."""
        return None if self.checkpoint is None else self.checkpoint.model_hash(quantization)


def find_model(name: str) -> PlannedModel:
    """By name, folder or file. Raises UnknownModel, CheckpointError or OSError."""
    lowered = name.lower()
    if lowered in _EMBEDDED_NAMES or canonical_path(name) == EMBEDDED_MODEL:
        folder = model_folder(EMBEDDED_MODEL)
        spec = spec_from_config(_SMOLLM2_135M)
        checkpoint = Checkpoint(folder) if folder.is_dir() else None
        return PlannedModel(
            name=SMOLLM2.name, spec=spec, is_tied=True, path=EMBEDDED_MODEL, checkpoint=checkpoint
        )
    if lowered in REFERENCES:
        spec = spec_from_config(REFERENCES[lowered])
        return PlannedModel(
            name=lowered, spec=spec, is_tied=spec.tie_word_embeddings, path=None, checkpoint=None
        )
    place = Path(os.path.expanduser(name))  # as it is where nobody has that name
    if not name.strip():
        raise UnknownModel("the model is an empty text: name a folder, or leave it out for the embedded one")
    if place.is_dir():
        return _of_folder(place)
    if place.is_file():
        spec = spec_from_config(read_json(place.parent, place.name))
        return PlannedModel(
            name=place.parent.resolve().name or place.name,
            spec=spec,
            is_tied=spec.tie_word_embeddings,
            path=None,
            checkpoint=None,
        )
    raise UnknownModel(
        f"no model {name!r}: give a folder in Hugging Face layout, its config.json, or one of "
        f"{', '.join(sorted(REFERENCES))}"
    )


def _of_folder(folder: Path) -> PlannedModel:
    """A folder with weights is opened as the engine does; without, its config speaks alone."""
    if not any(folder.glob("*.safetensors")):
        spec = spec_from_config(read_json(folder, "config.json"))
        return PlannedModel(
            name=folder.resolve().name,
            spec=spec,
            is_tied=spec.tie_word_embeddings,
            path=None,
            checkpoint=None,
        )
    checkpoint = Checkpoint(folder)
    return PlannedModel(
        name=folder.resolve().name,
        spec=checkpoint.spec,
        is_tied=checkpoint.is_tied,
        path=str(folder.resolve()),
        checkpoint=checkpoint,
    )
