"""A draft model: `python -m workers.training.draft --model FOLDER --out FOLDER`.

A decoder of one or two layers that begins as some layers of the target, between the target's own embedding
and head, and learns to say what the target says after the same tokens (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023; learning from the target's distributions over text of its own:
Zhou et al., "DistillSpec", 2023).

    config.json        the target's, with fewer layers
    model.safetensors  Llama's names, in bfloat16, without embedding and head, which are the target's;
                       draft_token_ids [V'] in int32: the rows of the head that are computed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaModel

from workers.model.checkpoint import Checkpoint
from workers.model.lending import TARGET_HASH
from workers.progress import Progress
from workers.training.acceptance import right_from_agreement, walk
from workers.training.command import add_plan_options, at_least_one, run_training
from workers.training.fit import FitOptions, fit
from workers.training.loss import distance
from workers.training.material import Lessons, Material, lessons_of
from workers.training.prompts import Part
from workers.training.states import padded
from workers.training.writing import Text

_MAX_GUESSES = 4  # that the score is told for
_EVALUATED = 16  # texts at a time
_NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


class Draft(torch.nn.Module):
    """Between the target's embedding and head, neither of which it trains."""

    def __init__(self, config: LlamaConfig, embedding: torch.Tensor) -> None:
        super().__init__()
        # The bare model brings an embedding of its own: one row, which nobody looks at.
        small = LlamaConfig.from_dict({**config.to_dict(), "vocab_size": 1, **_NO_SPECIAL_TOKENS})
        self.layers = LlamaModel(small)
        self.config = config
        self._embedding = embedding

    def forward(self, texts: Sequence[Text]) -> torch.Tensor:
        """(answer tokens of the texts, hidden): what the head takes to say each of them."""
        ids = padded([(*text.prompt_ids, *text.answer_ids[:-1]) for text in texts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.layers(inputs_embeds=self._embedding[ids].float(), use_cache=False)[0]
        firsts = [len(text.prompt_ids) - 1 for text in texts]
        return torch.cat(
            [
                hidden[row, first : first + len(text.answer_ids)]
                for row, (first, text) in enumerate(zip(firsts, texts, strict=True))
            ]
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """By the names of a Llama checkpoint."""
        return {
            f"model.{name}": value
            for name, value in self.layers.state_dict().items()
            if not name.startswith("embed_tokens.")
        }


def make_draft(checkpoint: Checkpoint, layers: Sequence[int], width: int, embedding: torch.Tensor) -> Draft:
    """A draft of these layers of the target, of whose feed-forward units the `width` largest are kept.

    Raises ValueError for a target that is no Llama, and layers or a width that it does not have."""
    if checkpoint.config.get("model_type") != "llama":
        raise ValueError(f"{checkpoint.folder}: model_type is not llama: no draft is made of it")
    config = LlamaConfig.from_dict(dict(checkpoint.config))
    if not layers or not all(0 <= layer < config.num_hidden_layers for layer in layers):
        raise ValueError(f"layers {list(layers)}: the target has layers 0 to {config.num_hidden_layers - 1}")
    if not 0 < width <= config.intermediate_size:
        raise ValueError(f"width {width}: the target has {config.intermediate_size} feed-forward units")
    config.num_hidden_layers, config.intermediate_size = len(layers), width
    draft = Draft(config, embedding)
    weights = {"norm.weight": _read(checkpoint, "model.norm.weight")}
    for place, layer in enumerate(layers):
        for name, value in _narrow(_layer(checkpoint, layer), width).items():
            weights[f"layers.{place}.{name}"] = value
    draft.layers.load_state_dict(weights, strict=False)
    missing = {name.removeprefix("model.") for name in draft.weights()} - set(weights)
    assert not missing, f"not in the target: {missing}"
    return draft


def train(
    draft: Draft, material: Material, lessons: Lessons, options: FitOptions, progress: Progress
) -> list[float]:
    """Changes the draft in place. `options.batch` counts texts. Returns the loss of each step."""
    numbers = material.of(Part.TRAINING)

    def loss_of(batch: Sequence[int]) -> torch.Tensor:
        chosen = [numbers[index] for index in batch]
        rows = torch.cat([torch.arange(*material.starts[number : number + 2]) for number in chosen])
        hidden = draft([material.texts[number] for number in chosen])
        return distance(hidden, material.head, lessons.places[rows], lessons.shares[rows])

    return fit(draft.layers.parameters(), loss_of, len(numbers), options, progress)


def score(draft: Draft, material: Material, part: Part) -> tuple[float, list[float]]:
    """How often the draft says the target's token, and tokens a step with 1, 2, ... guesses."""
    numbers = sorted(material.of(part), key=lambda number: len(material.texts[number].answer_ids))
    agrees: list[torch.Tensor] = []
    with torch.inference_mode():
        for at in range(0, len(numbers), _EVALUATED):
            chosen = [material.texts[number] for number in numbers[at : at + _EVALUATED]]
            said = (draft(chosen).to(material.head.dtype) @ material.head.T).argmax(dim=1)
            told = [
                material.answers[slice(*material.starts[n : n + 2])] for n in numbers[at : at + _EVALUATED]
            ]
            agrees += torch.split(said == torch.cat(told), [len(answer) for answer in told])
    right = [right_from_agreement(answer, _MAX_GUESSES) for answer in agrees]
    rates = [walk(right, guesses).tokens_per_step for guesses in range(1, _MAX_GUESSES + 1)]
    return float(torch.cat(agrees).double().mean()), rates


def save(draft: Draft, material: Material, folder: Path) -> None:
    """Writes the two files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**draft.config.to_dict(), "dtype": "bfloat16", TARGET_HASH: material.target_hash}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.bfloat16().contiguous() for name, value in draft.weights().items()}
    tensors["draft_token_ids"] = material.draft_token_ids.to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 with a sentence on stderr. Raises SystemExit(2) for bad options."""
    parser = argparse.ArgumentParser(prog="python -m workers.training.draft")
    add_plan_options(parser)
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="of the target, to begin with")
    parser.add_argument("--width", type=int, default=1536, help="feed-forward units of a layer")
    parser.add_argument("--epochs", type=at_least_one, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    fit_options = FitOptions(
        epochs=options.epochs, learning_rate=options.learning_rate, batch=8, seed=options.seed
    )

    def work(material: Material, progress: Progress) -> None:
        draft = make_draft(Checkpoint(options.model), options.layers, options.width, material.embedding)
        train(draft, material, lessons_of(material), fit_options, progress)
        save(draft, material, options.out)
        progress.end()
        for part in material.evaluated:
            agreement, rates = score(draft, material, part)
            print(
                f"{part.value}: draft vocabulary has {material.coverage(part):.1%} of the tokens; "
                f"{agreement:.3f} are said alike; tokens a step with 1.. guesses: "
                + " ".join(f"{rate:.3f}" for rate in rates)
            )

    return run_training(options, work)


def _layer(checkpoint: Checkpoint, layer: int) -> dict[str, torch.Tensor]:
    """Weights of one layer, by their names inside it."""
    prefix = f"model.layers.{layer}."
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): _read(checkpoint, name) for name in names}


def _narrow(layer: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """The layer with those feed-forward units whose weights are largest, in their order."""
    gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    size = layer[gate].norm(dim=1) * layer[up].norm(dim=1) * layer[down].norm(dim=0)
    kept = size.topk(width).indices.sort().values
    return {**layer, gate: layer[gate][kept], up: layer[up][kept], down: layer[down][:, kept]}


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    stored_name = checkpoint.stored_name(name)
    with safe_open(checkpoint.tensors[stored_name].file, framework="pt") as stored:
        found: torch.Tensor = stored.get_tensor(stored_name)
        return found.float()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
