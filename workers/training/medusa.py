"""Medusa heads: `python -m workers.training.medusa --model FOLDER --out FOLDER`.

From the target's last hidden state h the target itself says the next token t. Head 0 looks at both and
guesses the token after t; head 1 looks at what head 0 made and at the token after t, and so on:

    h_0 = h,   h_{i+1} = h_i + U_i silu(W_i [h_i, t_i] + b_i),   guess: the best of   head @ h_{i+1}

U_i, W_i and b_i are all that is trained; U_i begins at zero, where the head guesses the next token again. In
training the tokens t_i are those of the text, so that a head learns what follows a right guess. Sources: Cai
et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024, and Ankner
et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", 2024; here over the target's own head
instead of one of its own for each.

    config.json        model_type, hidden_size, inner_size, num_heads, vocab_size, target_model_hash
    heads.safetensors  heads.{i}.weight [inner, 2 * hidden], heads.{i}.bias [inner] and heads.{i}.out
                       [hidden, inner] in bfloat16, draft_token_ids [V'] in int32
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.model.lending import TARGET_HASH
from workers.model.medusa import token_inputs
from workers.progress import Progress
from workers.training.acceptance import walk
from workers.training.command import add_plan_options, at_least_one, run_training
from workers.training.fit import FitOptions, fit
from workers.training.loss import distance, draw_tokens
from workers.training.material import Lessons, Material, lessons_of
from workers.training.prompts import Part

_MAX_RANK = 4  # of the likely tokens of a head that are looked at, for trees of guesses
_CHUNK = 512  # rows at a time when guesses are made
_DRAWN = 1536  # tokens of a batch that stand for all that nothing in it says


class MedusaHeads(torch.nn.Module):
    """All heads of a target."""

    def __init__(self, num_heads: int, hidden_size: int, inner_size: int, seed: int = 0) -> None:
        super().__init__()
        first = torch.randn(
            num_heads, inner_size, 2 * hidden_size, generator=torch.Generator().manual_seed(seed)
        )
        first[:, :, :hidden_size] /= 2  # states are larger than tokens
        self.weight = torch.nn.Parameter(first / (2 * hidden_size) ** 0.5)
        self.bias = torch.nn.Parameter(torch.zeros(num_heads, inner_size))
        self.out = torch.nn.Parameter(torch.zeros(num_heads, hidden_size, inner_size))

    def forward(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """states (rows, hidden), tokens (rows, heads, hidden) that came after them -> (rows, heads, hidden),
        which the target's head takes."""
        found = []
        for weight, bias, out, token in zip(self.weight, self.bias, self.out, tokens.unbind(1), strict=True):
            inputs = torch.cat((states, token), dim=1)
            wide = torch.nn.functional.silu(torch.nn.functional.linear(inputs, weight, bias))
            states = states + torch.nn.functional.linear(wide, out)
            found.append(states)
        return torch.stack(found, dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaScore:
    """Of heads, over answers that they were not trained on."""

    tokens_per_step: Sequence[float]  # with the first 1, 2, ... heads, each with its best guess
    top_k: Sequence[Sequence[float]]  # of each head: how often the token is among its best 1, 2, ... guesses


def train(
    material: Material,
    lessons: Lessons,
    num_heads: int,
    inner_size: int,
    options: FitOptions,
    progress: Progress,
) -> MedusaHeads:
    """`options.batch` counts rows."""
    heads = MedusaHeads(num_heads, material.states.shape[1], inner_size, options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    rows, ends = material.rows_of(Part.TRAINING), _ends(material)
    ahead, tokens = torch.arange(1, num_heads + 1), token_inputs(material.head)

    def loss_of(batch: Sequence[int]) -> torch.Tensor:
        chosen = rows[torch.tensor(batch)]
        wanted = chosen[:, None] + ahead  # (rows, heads): the rows that head's tokens come from
        is_there = wanted < ends[chosen][:, None]
        told = material.answers[(wanted - 1).clamp(max=len(material.answers) - 1)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = heads(material.states[chosen].float(), tokens[told].float())[is_there].float()
        learnt = wanted[is_there]
        some = draw_tokens(material.head, lessons.places[learnt], _DRAWN, generator)
        return distance(features, some.head, some.places, lessons.shares[learnt], some.log_weights)

    fit(heads.parameters(), loss_of, len(rows), options, progress)
    return heads


def score(heads: MedusaHeads, material: Material, part: Part) -> MedusaScore:
    """Of the heads as they are stored, in bfloat16. Each is told the tokens of the answer: where a guess
    before its own is wrong, its own does not count."""
    num_heads, tokens = heads.weight.shape[0], token_inputs(material.head)
    stored = MedusaHeads(num_heads, *heads.out.shape[1:])
    stored.load_state_dict({name: value.bfloat16().float() for name, value in heads.state_dict().items()})
    right: list[torch.Tensor] = []  # of each text: (tokens, heads, rank)
    with torch.inference_mode():
        for number in material.of(part):
            start, end = material.starts[number : number + 2]
            answers = torch.cat((material.answers[start:end], material.answers.new_full((num_heads,), -1)))
            told = tokens[answers.unfold(0, num_heads, 1)[: end - start]].float()
            moved = stored(material.states[start:end].float(), told).to(material.head.dtype)
            guesses = torch.cat(
                [(part @ material.head.T).topk(_MAX_RANK).indices for part in torch.split(moved, _CHUNK)]
            )
            is_right = torch.zeros(guesses.shape, dtype=torch.bool)
            for head in range(min(num_heads, end - start - 1)):
                right_ones = material.answers[start + 1 + head : end]
                is_right[: len(right_ones), head] = guesses[: len(right_ones), head] == right_ones[:, None]
            right.append(is_right)
    chains = [answer[:, :, 0] for answer in right]
    return MedusaScore(
        tokens_per_step=[walk(chains, guesses).tokens_per_step for guesses in range(1, num_heads + 1)],
        top_k=[
            _top_k([answer[: max(0, len(answer) - 1 - head), head] for answer in right])
            for head in range(num_heads)
        ],
    )


def save(heads: MedusaHeads, material: Material, folder: Path) -> None:
    """Writes the two files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    num_heads, hidden_size, inner_size = heads.out.shape
    config = {
        "model_type": "tandem_medusa",
        "hidden_size": hidden_size,
        "inner_size": inner_size,
        "num_heads": num_heads,
        "vocab_size": len(material.embedding),
        TARGET_HASH: material.target_hash,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {"draft_token_ids": material.draft_token_ids.to(torch.int32)}
    for head in range(num_heads):
        for name, values in (("weight", heads.weight), ("bias", heads.bias), ("out", heads.out)):
            tensors[f"heads.{head}.{name}"] = values.detach()[head].bfloat16().contiguous()
    save_file(tensors, folder / "heads.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 with a sentence on stderr. Raises SystemExit(2) for bad options."""
    parser = argparse.ArgumentParser(prog="python -m workers.training.medusa")
    add_plan_options(parser)
    parser.add_argument("--heads", type=at_least_one, default=3)
    parser.add_argument("--inner", type=at_least_one, default=768, help="units of a head")
    parser.add_argument("--epochs", type=at_least_one, default=3)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    options = parser.parse_args(arguments)
    fit_options = FitOptions(
        epochs=options.epochs, learning_rate=options.learning_rate, batch=512, seed=options.seed
    )

    def work(material: Material, progress: Progress) -> None:
        heads = train(material, lessons_of(material), options.heads, options.inner, fit_options, progress)
        save(heads, material, options.out)
        progress.end()
        for part in material.evaluated:
            found = score(heads, material, part)
            print(f"{part.value}: draft vocabulary has {material.coverage(part):.1%} of the tokens")
            for number, (rate, ranks) in enumerate(zip(found.tokens_per_step, found.top_k, strict=True)):
                among = " ".join(f"{share:.3f}" for share in ranks)
                print(
                    f"  {number + 1} heads: {rate:.3f} tokens a step; of this head, best 1..4 right: {among}"
                )

    return run_training(options, work)


def _ends(material: Material) -> torch.Tensor:
    """(rows,): the row behind the text of each row."""
    starts = torch.tensor(material.starts)
    return starts[1:].repeat_interleave(starts.diff())


def _top_k(right: Sequence[torch.Tensor]) -> list[float]:
    """Of (tokens, ranks): the share of tokens with a right guess among the first 1, 2, ... ranks."""
    seen = torch.cat(list(right)).double()
    return [float(seen[:, : rank + 1].sum(dim=1).mean()) for rank in range(seen.shape[1])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
