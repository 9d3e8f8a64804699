"""A draft model beside the served one: the answers are those of plain decoding, whatever it guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import checkpoints
from tests.models.draft_folders import SHARED, random_draft, with_token_ids, without_shared
from tests.models.engine_groups import GREEDY, Answer, Client, InNoTime, group_config, start_group
from tests.models.quantized_checkpoints import form, make
from tests.models.served import PROMPTS
from workers.config import SpeculativeConfig
from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.files import SINGLE_FILE
from workers.quantizing.folder import quantize_folder
from workers.runtime.errors import RankConfigError
from workers.runtime.launch import LocalGroup
from workers.runtime.rank import Leader
from workers.types import SamplingParams

FamilyFolder = Callable[[str], Path]


def guessing(folder: Path, most: int = 5) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=str(folder), max_draft_tokens=most)


@contextmanager
def group_with(folder: Path, draft: Path, tensor_parallel: int = 1, **options: str) -> Iterator[LocalGroup]:
    with start_group(folder, tensor_parallel, speculative=guessing(draft), **options) as group:
        yield group


def clients(group: LocalGroup, draft: Path, **options: int | bool) -> tuple[Client, Client]:
    """Without guesses, and with them."""
    facts, executor = group.facts, group.executor
    guessed = Client(facts, InNoTime(executor), speculative=guessing(draft), clock=lambda: 0.0, **options)
    return Client(facts, executor, **options), guessed


def told(answers: list[Answer]) -> list[tuple[list[int], object]]:
    return [(answer.token_ids, answer.finish) for answer in answers]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def served(
    request: pytest.FixtureRequest, family_folder: FamilyFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalGroup, Path]]:
    """The draft model is the model itself, without a third of its head: right now and then."""
    folder = family_folder("llama")
    draft = with_token_ids(
        without_shared(folder, tmp_path_factory.mktemp("lent")),
        tmp_path_factory.mktemp("reduced"),
        [token_id for token_id in range(128) if token_id % 3],
    )
    with group_with(folder, draft, request.param) as group:
        yield group, draft


SPECIAL = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=7, num_logprobs=2),
    "penalties": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=1.0, num_logprobs=2),
    "bias, least length": replace(GREEDY, logit_bias=((9, 3.0),), min_tokens=6, stop_token_ids=(9,)),
    "scores": replace(GREEDY, num_logprobs=5, num_prompt_logprobs=1),
}


@pytest.mark.parametrize("sampling", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_answers_are_those_of_plain_decoding(
    served: tuple[LocalGroup, Path], sampling: SamplingParams, together: bool
) -> None:
    plain, guessed = clients(*served)
    expected, answers = (client.generate(PROMPTS, sampling, together=together) for client in (plain, guessed))
    assert told(answers) == told(expected)
    assert [answer.prompt_logprobs for answer in answers] == [answer.prompt_logprobs for answer in expected]
    for mine, other in zip(answers, expected, strict=True):
        for ours, theirs in zip(mine.logprobs, other.logprobs, strict=True):
            assert (ours.token_id, ours.logprob) == (theirs.token_id, pytest.approx(theirs.logprob, abs=1e-4))
    stats = guessed.engine.stats()
    assert 0 < stats.accepted_tokens_total < stats.drafted_tokens_total
    assert stats.num_steps <= plain.engine.stats().num_steps


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_chunks_prefix_cache_and_little_memory_change_nothing(
    served: tuple[LocalGroup, Path], chunk: int | None
) -> None:
    expected = clients(*served)[0].generate(PROMPTS, GREEDY)
    small = clients(*served, num_blocks=10, expected_output_tokens=1, max_prefill_chunk=chunk)[1]
    for _ in range(2):  # the second time some prompts are cached
        for seed in (200, 201, 202):
            small.submit(checkpoints.prompt_ids(16, seed=seed), replace(GREEDY, max_tokens=36))
        ids = [small.submit(prompt) for prompt in PROMPTS]
        answers = small.finish()
        assert [answers[request_id, 0].token_ids for request_id in ids] == [a.token_ids for a in expected]
    assert chunk is not None or small.engine.stats().preemptions_total > 0


def test_choices_and_seeds(served: tuple[LocalGroup, Path]) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    told_tokens = []
    for client in clients(*served):
        request_id = client.submit(PROMPTS[3], sampling, num_choices=6)
        answers = client.finish()
        told_tokens.append([answers[request_id, choice].token_ids for choice in range(6)])
    assert told_tokens[0] == told_tokens[1]
    assert len(set(map(tuple, told_tokens[0]))) == 6


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "gpt2"])
def test_of_a_model_that_guesses_for_itself_everything_is_right(
    family_folder: FamilyFolder, family: str
) -> None:
    folder = family_folder(family)
    with group_with(folder, folder) as group:
        plain, guessed = clients(group, folder)
        assert told(guessed.generate(PROMPTS)) == told(plain.generate(PROMPTS))
        stats = guessed.engine.stats()
        assert stats.accepted_tokens_total == stats.drafted_tokens_total > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_guesses_change_nothing(family_folder: FamilyFolder, tmp_path: Path, dtype: str) -> None:
    draft = random_draft(tmp_path / "draft", hidden_size=32)
    with group_with(family_folder("mistral"), draft, dtype=dtype) as group:
        plain, guessed = clients(group, draft)
        for sampling in (GREEDY, SPECIAL["seeded"]):
            assert told(guessed.generate(PROMPTS, sampling)) == told(plain.generate(PROMPTS, sampling))
        assert guessed.engine.stats().drafted_tokens_total > 0


def test_in_bfloat16_everything_is_right_too(family_folder: FamilyFolder) -> None:
    """One call a pass, as of the served model."""
    folder = family_folder("llama")
    with group_with(folder, folder, dtype="bfloat16") as group:
        plain, guessed = clients(group, folder)
        assert told(guessed.generate(PROMPTS)) == told(plain.generate(PROMPTS))
        stats = guessed.engine.stats()
        assert stats.accepted_tokens_total == stats.drafted_tokens_total > 0


def test_its_blocks_count_in_the_size_of_the_pool(family_folder: FamilyFolder, tmp_path: Path) -> None:
    """A draft model like the served one halves the blocks that a limit holds."""
    folder = family_folder("llama")
    sizes = []
    for speculative in (SpeculativeConfig(), guessing(folder)):
        config = group_config(folder, 1, speculative=speculative)
        leader = Leader(
            replace(config, cache=replace(config.cache, num_blocks=None, max_bytes=1 << 20)),
            on_failure=lambda reason: None,
        )
        sizes.append(leader.load().num_blocks)
        leader.close()
    assert sizes[0] == 2 * sizes[1]


def test_what_is_left_out_is_the_models(family_folder: FamilyFolder, tmp_path: Path) -> None:
    folder = family_folder("llama")
    model = Checkpoint(folder)
    for number, names in enumerate([SHARED, SHARED[:1], SHARED[1:2], SHARED[2:]]):
        draft = Checkpoint(without_shared(folder, tmp_path / str(number), names), model)
        assert {name for name, stored in draft.tensors.items() if stored.file.parent == folder} == {*names}
    tied = family_folder("llama_tied")
    assert Checkpoint(tied, model).head_name == "model.embed_tokens.weight"  # its own: nothing is left out


def test_a_head_in_few_bits_is_its_own_and_is_not_lent(family_folder: FamilyFolder, tmp_path: Path) -> None:
    folder, out = family_folder("llama"), tmp_path / "out"
    quantize_folder(Checkpoint(folder), Quantization.INT8, out, lambda line: None)
    draft = Checkpoint(out, Checkpoint(folder))
    assert {stored.file.parent for stored in draft.tensors.values()} == {out}
    lender = make(tmp_path, folder, form("fp8")).folder
    tensors = load_file(lender / SINGLE_FILE)
    values = {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}
    scale = {"lm_head.weight_scale": torch.ones(())}
    save_file({**tensors, **values, **scale}, lender / SINGLE_FILE, metadata={"format": "pt"})
    headless = without_shared(folder, tmp_path / "headless", SHARED[2:])
    with pytest.raises(CheckpointError, match=rf"{headless} has no lm_head\.weight, and that of .* few bits"):
        Checkpoint(headless, Checkpoint(lender))


def test_folders_that_do_not_fit_are_refused(family_folder: FamilyFolder, tmp_path: Path) -> None:
    folder = family_folder("llama")
    model = Checkpoint(folder)

    def refusal(draft: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(draft, model)
        return str(caught.value)

    other_words = refusal(random_draft(tmp_path / "a", vocab_size=96))
    assert f"{tmp_path / 'a'}: vocab_size is 96, that of {folder} is 128" in other_words
    narrow = without_shared(random_draft(tmp_path / "b", hidden_size=32), tmp_path / "c", SHARED[2:])
    assert "hidden_size is 32, that of" in (text := refusal(narrow)) and "needs lm_head.weight" in text
    headless = without_shared(folder, tmp_path / "d", ["model.layers.0.mlp.up_proj.weight"])
    assert "missing model.layers.0.mlp.up_proj.weight" in refusal(headless)
    assert "draft_token_ids is I64 [2]" in refusal(
        with_token_ids(folder, tmp_path / "e", [1, 2], torch.int64)
    )
    with pytest.raises(CheckpointError, match="not part of this model: draft_token_ids"):
        Checkpoint(with_token_ids(folder, tmp_path / "f", [1, 2]))


@pytest.mark.parametrize("ids", [[3, 2], [5, 5], [-1, 4], [4, 128]])
def test_ids_that_are_none_are_refused_at_the_start(
    family_folder: FamilyFolder, tmp_path: Path, ids: list[int]
) -> None:
    folder = family_folder("llama")
    draft = with_token_ids(folder, tmp_path / "draft", ids)
    with pytest.raises(
        CheckpointError, match="draft_token_ids must be token ids from 0 to 127 in rising order"
    ):
        start_group(folder, 1, speculative=guessing(draft))


def test_a_group_without_a_folder_does_not_start(family_folder: FamilyFolder) -> None:
    with pytest.raises(RankConfigError, match=r"speculative\.model is empty"):
        start_group(family_folder("llama"), 1, speculative=SpeculativeConfig(method="draft_model"))
    with pytest.raises(CheckpointError, match="no such model folder"):
        start_group(family_folder("llama"), 1, speculative=guessing(Path("/nowhere/at/all")))
