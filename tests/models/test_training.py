"""The trainings as a person runs them, on a target with random weights."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.models import checkpoints
from tests.models.toy_tokenizers import ascii_tokenizer
from workers.model.checkpoint import Checkpoint
from workers.model.medusa_folder import MedusaFolder
from workers.progress import Progress
from workers.training import draft, medusa
from workers.training.fit import FitOptions
from workers.training.material import Material, Plan, lessons_of, prepare
from workers.training.prompts import Part, TextError

HIDDEN, VOCAB, WIDTH = 64, 128, 96
OPTIONS = (
    "--prompts",
    "20",
    "--own-prompts",
    "0",
    "--max-tokens",
    "12",
    "--vocabulary",
    "64",
    "--threads",
    "1",
    "--epochs",
    "1",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.build(
        tmp_path_factory.mktemp("target"), checkpoints.family("llama_tied"), max_position_embeddings=512
    )
    ascii_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def material(target: Path, work: Path) -> Material:
    plan = Plan(
        folder=target, work=work, seed=0, num_prompts=20, num_asked=0, max_tokens=12, vocabulary=64, threads=1
    )
    return prepare(plan, Progress(io.StringIO()))


def test_states_say_the_answers(material: Material, target: Path) -> None:
    """Of greedy texts; in bfloat16 a near tie may fall otherwise."""
    assert [text.number for text in material.texts] == list(range(44))
    assert {len(text.answer_ids) for text in material.texts} == {12}
    assert material.states.shape == (44 * 12, HIDDEN)
    rows = material.rows_of(Part.HELD_OUT)
    said = (material.states[rows] @ material.embedding.T).argmax(dim=1)
    told = torch.tensor(
        [token for number in material.of(Part.HELD_OUT) for token in material.texts[number].answer_ids]
    )
    assert float((said == told).double().mean()) > 0.8
    assert material.target_hash == Checkpoint(target).model_hash()


def test_what_is_there_is_not_made_again(material: Material, target: Path, work: Path) -> None:
    """An interrupted writing goes on; a finished one costs nothing."""
    file = work / "text.jsonl"
    whole = file.read_bytes()
    plan = Plan(
        folder=target, work=work, seed=0, num_prompts=20, num_asked=0, max_tokens=12, vocabulary=64, threads=1
    )
    prepare(plan, Progress(io.StringIO()))
    assert file.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:30]) + lines[30][:9])
    again = prepare(plan, Progress(io.StringIO()))
    assert [text.number for text in again.texts] == list(range(44))
    assert [text.prompt_ids for text in again.texts] == [text.prompt_ids for text in material.texts]


def test_the_model_is_asked_for_prompts_once(target: Path, tmp_path: Path) -> None:
    ending = shutil.copytree(target, tmp_path / "ending")
    config = json.loads((ending / "config.json").read_text())
    (ending / "config.json").write_text(json.dumps({**config, "eos_token_id": list(range(0, VOCAB, 16))}))
    plan = Plan(
        folder=ending,
        work=tmp_path / "work",
        seed=0,
        num_prompts=4,
        num_asked=16,
        max_tokens=4,
        vocabulary=64,
        threads=1,
    )
    texts = prepare(plan, Progress(io.StringIO())).texts
    own = json.loads((plan.work / "prompts.json").read_text())["prompts"]
    assert 0 < len(own) == len(set(own)) <= 16
    assert [text.number for text in texts] == list(range(4 + 24 + len(own)))
    assert all(text.part is Part.TRAINING for text in texts[28:])
    before = [file.stat().st_mtime_ns for file in sorted(plan.work.iterdir())]
    prepare(plan, Progress(io.StringIO()))
    assert [file.stat().st_mtime_ns for file in sorted(plan.work.iterdir())] == before
    (plan.work / "text.jsonl").unlink()
    with pytest.raises(TextError, match=r"prompts\.json has other prompts than those of .*delete it first"):
        prepare(replace(plan, seed=1), Progress(io.StringIO()))


def test_a_draft_learns_and_loads(material: Material, target: Path, tmp_path: Path) -> None:
    made = draft.make_draft(Checkpoint(target), [0], 32, material.embedding)
    options = FitOptions(epochs=6, learning_rate=3e-3, batch=4, seed=0)
    losses = draft.train(made, material, lessons_of(material), options, Progress(io.StringIO()))
    assert len(losses) == 6 * 5  # 18 texts
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    draft.save(made, material, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["draft_token_ids"].dtype == torch.int32
    assert stored["draft_token_ids"].tolist() == material.draft_token_ids.tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"], config["vocab_size"]) == (1, 32, VOCAB)
    # transformers takes the layer, and says with it what the draft says.
    model = LlamaForCausalLM(made.config).eval()
    weights = {name: value.float() for name, value in stored.items() if name != "draft_token_ids"}
    left = model.load_state_dict(
        {**weights, "model.embed_tokens.weight": material.embedding.float()}, strict=False
    )
    assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])
    text = material.texts[0]
    ids = torch.tensor([[*text.prompt_ids, *text.answer_ids[:-1]]])
    with torch.inference_mode():
        expected = model.model(ids)[0][0, len(text.prompt_ids) - 1 :]
        assert torch.allclose(made([text]).float(), expected, atol=0.1)


@pytest.mark.parametrize(
    ("layers", "width", "says"),
    [
        ([2], 96, "layers [2]: the target has layers 0 to 1"),
        ([], 96, "layers []: the target has layers 0 to 1"),
        ([0], 97, "width 97: the target has 96 feed-forward units"),
    ],
)
def test_drafts_that_cannot_be_made(
    material: Material, target: Path, layers: list[int], width: int, says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        draft.make_draft(Checkpoint(target), layers, width, material.embedding)


def test_commands(
    material: Material, target: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", str(target), "--work", str(work), *OPTIONS)
    assert medusa.main([*common, "--out", str(tmp_path / "medusa"), "--heads", "3"]) == 0
    assert MedusaFolder(tmp_path / "medusa", Checkpoint(target)).num_heads == 3
    assert draft.main([*common, "--out", str(tmp_path / "draft"), "--layers", "0", "1", "--width", "32"]) == 0
    made = Checkpoint(tmp_path / "draft", lender=Checkpoint(target))
    assert made.has_draft_token_ids
    assert made.tensors["model.layers.1.mlp.down_proj.weight"].entry.shape == (HIDDEN, 32)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^(held_out|questions): ", printed, re.MULTILINE)) == 4
    assert len(re.findall(r"^  [123] heads: \d\.\d{3} tokens a step", printed, re.MULTILINE)) == 6


def test_guessing_for_another_model_is_said(
    material: Material, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    medusa.save(medusa.MedusaHeads(3, HIDDEN, 32), material, tmp_path / "medusa")
    draft.save(
        draft.make_draft(Checkpoint(target), [0], 32, material.embedding), material, tmp_path / "draft"
    )
    other = shutil.copytree(target, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    own, others = Checkpoint(target), Checkpoint(other)
    assert own.model_hash() != others.model_hash()
    for folder in (tmp_path / "medusa", tmp_path / "draft"):
        for model, warnings in (
            (own, []),
            (
                others,
                [
                    f"{folder} was trained to guess for the model with the hash {own.model_hash()}, that of "
                    f"{other} is {others.model_hash()}: guesses will be right less often"
                ],
            ),
        ):
            caplog.clear()
            if folder.name == "medusa":
                MedusaFolder(folder, model)
            else:
                Checkpoint(folder, lender=model)
            assert [record.message for record in caplog.records] == warnings


def test_a_folder_without_a_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert medusa.main(["--model", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *OPTIONS]) == 1
    assert "no such model folder" in capsys.readouterr().err
