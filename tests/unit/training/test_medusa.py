from __future__ import annotations

import io
import json
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.material_maker import HIDDEN, VOCAB, make_material
from workers.progress import Progress
from workers.training.fit import FitOptions
from workers.training.material import lessons_of
from workers.training.medusa import MedusaHeads, save, score, train
from workers.training.prompts import Part
from workers.training.states import row_starts

INNER = 24
OPTIONS = FitOptions(epochs=15, learning_rate=0.03, batch=32, seed=0)


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    material = make_material()
    return train(material, lessons_of(material), 2, INNER, OPTIONS, Progress(io.StringIO()))


def test_heads_that_know_nothing_guess_the_next_token_again() -> None:
    found = score(MedusaHeads(2, HIDDEN, INNER), make_material(), Part.HELD_OUT)
    assert found.tokens_per_step == [1.0, 1.0]
    assert [ranks[0] for ranks in found.top_k] == [0.0, 0.0]


def test_an_answer_too_short_for_a_head_says_nothing_of_it() -> None:
    whole = make_material()
    texts = [replace(text, answer_ids=text.answer_ids[:2]) for text in whole.texts]
    states = whole.states.reshape(len(texts), -1, HIDDEN)[:, :2].reshape(-1, HIDDEN)
    answers = whole.answers.reshape(len(texts), -1)[:, :2].reshape(-1)
    material = replace(whole, texts=texts, starts=row_starts(texts), states=states, answers=answers)
    found = score(MedusaHeads(3, HIDDEN, INNER), material, Part.HELD_OUT)
    assert [isnan(ranks[0]) for ranks in found.top_k] == [False, True, True]


def test_training_finds_what_the_states_tell(heads: MedusaHeads) -> None:
    found = score(heads, make_material(), Part.HELD_OUT)
    assert found.top_k[0][0] > 0.5
    assert found.tokens_per_step[0] > 1.4
    assert list(found.top_k[0]) == sorted(found.top_k[0])


def test_heads_learn_what_follows_the_token_that_they_are_told() -> None:
    material = make_material()
    blind = replace(material, states=torch.zeros_like(material.states))
    heads = train(blind, lessons_of(material), 2, INNER, OPTIONS, Progress(io.StringIO()))
    for ranks in score(heads, blind, Part.HELD_OUT).top_k:
        assert ranks[0] > 0.3  # without it the most frequent token is as good as any: one in 40


def test_the_same_seed_makes_the_same_heads(heads: MedusaHeads) -> None:
    material = make_material()
    again = train(material, lessons_of(material), 2, INNER, OPTIONS, Progress(io.StringIO()))
    assert torch.equal(again.weight, heads.weight) and torch.equal(again.out, heads.out)


def test_the_files_have_the_names_and_shapes(heads: MedusaHeads, tmp_path: Path) -> None:
    save(heads, make_material(), tmp_path / "medusa")
    assert json.loads((tmp_path / "medusa/config.json").read_text()) == {
        "model_type": "tandem_medusa",
        "hidden_size": HIDDEN,
        "inner_size": INNER,
        "num_heads": 2,
        "vocab_size": VOCAB,
        "target_model_hash": "0" * 64,
    }
    stored = load_file(tmp_path / "medusa/heads.safetensors")
    assert {name: (tuple(value.shape), value.dtype) for name, value in stored.items()} == {
        **{
            f"heads.{head}.{name}": (shape, torch.bfloat16)
            for head in (0, 1)
            for name, shape in (
                ("weight", (INNER, 2 * HIDDEN)),
                ("bias", (INNER,)),
                ("out", (HIDDEN, INNER)),
            )
        },
        "draft_token_ids": ((VOCAB,), torch.int32),
    }
    assert torch.equal(stored["heads.1.weight"], heads.weight[1].bfloat16())
