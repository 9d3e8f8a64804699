"""Medusa heads: the answers are those of plain decoding, whatever they guess."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import checkpoints
from tests.models.draft_folders import knowing_heads, medusa_heads, random_heads
from tests.models.engine_groups import GREEDY, Answer, Client, InNoTime, start_group
from tests.models.served import PROMPTS
from workers.config import SpeculativeConfig
from workers.kernels import Quantization, TorchKernels
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.medusa import load_heads
from workers.model.medusa_folder import MedusaFolder
from workers.runtime.launch import LocalGroup
from workers.types import SamplingParams

FamilyFolder = Callable[[str], Path]
SEEDED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=7, num_logprobs=2)


def guessing(folder: Path, most: int = 5) -> SpeculativeConfig:
    return SpeculativeConfig(method="medusa", model=str(folder), max_draft_tokens=most)


def clients(group: LocalGroup, heads: Path, *, most: int = 5, **options: int) -> tuple[Client, Client]:
    """Without guesses, and with them."""
    facts, executor = group.facts, group.executor
    config = guessing(heads, most)
    guessed = Client(facts, InNoTime(executor), speculative=config, clock=lambda: 0.0, **options)
    return Client(facts, executor, **options), guessed


def told(answers: list[Answer]) -> list[tuple[list[int], object]]:
    return [(answer.token_ids, answer.finish) for answer in answers]


@pytest.fixture(scope="module", params=[("llama", 1), ("llama", 2), ("gpt2", 1)], ids=str)
def served(
    request: pytest.FixtureRequest, family_folder: FamilyFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalGroup, Path]]:
    family, tensor_parallel = request.param
    heads = random_heads(tmp_path_factory.mktemp("heads") / "random")
    with start_group(family_folder(family), tensor_parallel, speculative=guessing(heads)) as group:
        yield group, heads


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SEEDED, replace(GREEDY, repetition_penalty=1.3, num_prompt_logprobs=1)],
    ids=["greedy", "seeded", "penalty and scores"],
)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_random_guesses_change_nothing(
    served: tuple[LocalGroup, Path], sampling: SamplingParams, together: bool
) -> None:
    plain, guessed = clients(*served)
    expected, answers = (client.generate(PROMPTS, sampling, together=together) for client in (plain, guessed))
    assert told(answers) == told(expected)
    assert guessed.engine.stats().drafted_tokens_total > 0


def test_chunks_and_little_memory_change_nothing(served: tuple[LocalGroup, Path]) -> None:
    expected = clients(*served)[0].generate(PROMPTS)
    small = clients(*served, num_blocks=8, expected_output_tokens=1, max_prefill_chunk=24)[1]
    for seed in (200, 201, 202):
        small.submit(checkpoints.prompt_ids(16, seed=seed), replace(GREEDY, max_tokens=36))
    ids = [small.submit(prompt) for prompt in PROMPTS]
    answers = small.finish()
    assert [answers[request_id, 0].token_ids for request_id in ids] == [a.token_ids for a in expected]
    assert small.engine.stats().preemptions_total > 0


@pytest.mark.parametrize(("dtype", "tensor_parallel"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)])
def test_heads_that_know_are_always_right(tmp_path: Path, dtype: str, tensor_parallel: int) -> None:
    perm = [(token_id * 5 + 3) % 96 for token_id in range(96)]
    folder = checkpoints.successor(tmp_path / "model", perm)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    heads = knowing_heads(tmp_path / "heads", perm, embedding, 3)
    with start_group(folder, tensor_parallel, dtype=dtype, speculative=guessing(heads)) as group:
        plain, guessed = clients(group, heads, most=3)  # one a head
        prompts = [[7], [11, 12, 40], list(range(20))]
        answers = guessed.generate(prompts)
        assert told(answers) == told(plain.generate(prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            before = [prompt[-1], *answer.token_ids]
            assert answer.token_ids == [perm[token_id] for token_id in before[:-1]]
        stats = guessed.engine.stats()
        assert stats.accepted_tokens_total == stats.drafted_tokens_total > 20


def test_folders_that_do_not_fit_are_refused(family_folder: FamilyFolder, tmp_path: Path) -> None:
    folder = family_folder("llama")
    model = Checkpoint(folder)
    good = (torch.zeros(64, 128), torch.zeros(64))

    def refusal(heads: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            MedusaFolder(heads, model)
        return str(caught.value)

    assert "no such folder" in refusal(tmp_path / "absent")
    other = medusa_heads(tmp_path / "a", [good], model_type="llama")
    assert "model_type is 'llama', it must be 'tandem_medusa'" in refusal(other)
    narrow = medusa_heads(tmp_path / "b", [good], hidden_size=32)
    assert f"hidden_size is 32, that of {folder} is 64" in refusal(narrow)
    words = medusa_heads(tmp_path / "c", [good], vocab_size=100)
    assert f"vocab_size is 100, that of {folder} is 128" in refusal(words)
    assert "missing heads.1.weight [64, 128]" in refusal(medusa_heads(tmp_path / "d", [good], num_heads=2))
    flat = medusa_heads(tmp_path / "e", [(torch.zeros(64), torch.zeros(64))])
    assert "heads.0.weight is F32 [64], it must be [64, 128]" in refusal(flat)
    empty = medusa_heads(tmp_path / "f", [good], ids=[])
    assert "draft_token_ids is I32 [0], it must be I32 with 1 to 128 ids" in refusal(empty)


@pytest.mark.parametrize("ids", [[3, 2], [4, 128]])
def test_ids_that_are_none_are_refused_at_the_start(
    family_folder: FamilyFolder, tmp_path: Path, ids: list[int]
) -> None:
    heads = medusa_heads(tmp_path / "heads", [(torch.zeros(64, 128), torch.zeros(64))], ids=ids)
    with pytest.raises(CheckpointError, match="draft_token_ids must be token ids from 0 to 127 in rising"):
        start_group(family_folder("llama"), 1, speculative=guessing(heads))


def test_heads_beyond_their_number_format_are_refused(family_folder: FamilyFolder, tmp_path: Path) -> None:
    heads = medusa_heads(tmp_path / "heads", [(torch.full((64, 128), 1e6), torch.zeros(64))])
    folder = MedusaFolder(heads, Checkpoint(family_folder("llama")))
    with pytest.raises(CheckpointError, match=r"heads\.0: weights from 1e\+06 to 1e\+06 .* use int8"):
        load_heads(folder, TorchKernels(), torch.float32, torch.device("cpu"), Quantization.INT4)


def test_heads_that_are_not_finite_are_refused_at_the_start(
    family_folder: FamilyFolder, tmp_path: Path
) -> None:
    heads = medusa_heads(tmp_path / "heads", [(torch.full((64, 128), torch.inf), torch.zeros(64))])
    with pytest.raises(CheckpointError, match=r"heads\.0 holds NaN or infinite values"):
        start_group(family_folder("llama"), 1, speculative=guessing(heads))
