"""Guessed tokens over real models: the answers, and what is said of them, are those of plain decoding.

Guesses come from somebody who knows the answer and is wrong now and then, so that every length of a right
beginning occurs; and from the methods that the product has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.engine_groups import GREEDY, Answer
from tests.models.served import PROMPTS, Served, serve
from workers.config import SpeculativeConfig
from workers.decoding.drafter import METHODS
from workers.engine import text_guesses
from workers.types import SamplingParams

GROUPS = [("llama", 1), ("llama", 2), ("mistral", 1), ("qwen2", 2), ("qwen3", 1), ("gpt2", 1)]
GUESSING = SpeculativeConfig(method="prompt_lookup", max_draft_tokens=6)


class Prophet:
    """Knows how sequences go on, and errs; `workers.decoding.drafter.Drafter`."""

    def __init__(self, endings: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._endings = endings
        self._draw = random.Random(seed)
        self._tokens: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        for prompt, ending in self._endings.items():
            if tuple(self._tokens[: len(prompt)]) == prompt:
                told = ending[len(self._tokens) - len(prompt) :][:max_tokens]
                return tuple(3 if self._draw.random() < 0.2 else token for token in told)
        return ()

    def note_checked(self, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        assert len(sampled) == len(drafts) + 1


@pytest.fixture(scope="module", params=GROUPS, ids=lambda pair: f"{pair[0]}-tp{pair[1]}")
def served(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Iterator[Served]:
    name, tensor_parallel = request.param
    with serve(family_folder(name), tensor_parallel) as group:
        yield group


@pytest.fixture
def foretold(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[list[int]]], None]:
    """Has these answers to PROMPTS guessed."""

    def foretell(answers: list[list[int]]) -> None:
        endings = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
        seeds = iter(range(1_000_000))
        monkeypatch.setattr(text_guesses, "drafter_of", lambda method: Prophet(endings, next(seeds)))

    return foretell


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_greedy_answers_are_transformers(
    served: Served, foretold: Callable[[list[list[int]]], None], together: bool
) -> None:
    foretold(served.expected)
    client = served.client(speculative=GUESSING)
    answers = client.generate(PROMPTS, together=together)
    assert [answer.token_ids for answer in answers] == served.expected
    stats = client.engine.stats()
    assert 0.3 * stats.drafted_tokens_total < stats.accepted_tokens_total < stats.drafted_tokens_total


@pytest.mark.parametrize("method", METHODS)
def test_each_method_answers_like_transformers(served: Served, method: str) -> None:
    client = served.client(speculative=SpeculativeConfig(method=method, max_draft_tokens=5))
    answers = client.generate(PROMPTS)
    assert [answer.token_ids for answer in answers] == served.expected


SPECIAL = {
    "seeded": SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, num_logprobs=2),
    "penalties": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=1.0, num_logprobs=2),
    "bias, least length": replace(GREEDY, logit_bias=((9, 3.0),), min_tokens=6, stop_token_ids=(9,)),
    "scores": replace(GREEDY, num_logprobs=5),
}


@pytest.mark.parametrize("sampling", SPECIAL.values(), ids=SPECIAL)
def test_special_wishes_are_met_as_without_guesses(
    served: Served, foretold: Callable[[list[list[int]]], None], sampling: SamplingParams
) -> None:
    plain = served.client().generate(PROMPTS, sampling)
    foretold([answer.token_ids for answer in plain])
    client = served.client(speculative=GUESSING)
    guessed = client.generate(PROMPTS, sampling)
    assert [answer.token_ids for answer in guessed] == [answer.token_ids for answer in plain]
    assert [answer.finish for answer in guessed] == [answer.finish for answer in plain]
    assert client.engine.stats().accepted_tokens_total > 0
    for ours, theirs in zip(guessed, plain, strict=True):
        _assert_same_scores(ours, theirs)


def test_memory_that_is_short_changes_nothing(
    served: Served, foretold: Callable[[list[list[int]]], None]
) -> None:
    foretold(served.expected)
    client = served.client(speculative=GUESSING, num_blocks=10, expected_output_tokens=1)
    for seed in (200, 201, 202):
        client.submit(checkpoints.prompt_ids(16, seed=seed), replace(GREEDY, max_tokens=36))
    ids = [client.submit(prompt) for prompt in PROMPTS]
    answers = client.finish()
    assert [answers[request_id, 0].token_ids for request_id in ids] == served.expected
    assert client.engine.stats().preemptions_total > 0


def test_each_seed_draws_what_it_draws_without_guesses(
    served: Served, foretold: Callable[[list[list[int]]], None]
) -> None:
    """Seed by seed the same tokens, so the same distribution."""
    sampling = [replace(GREEDY, temperature=1.0, max_tokens=8, seed=seed) for seed in range(16)]
    plain = [served.client().generate(PROMPTS[:1], each)[0].token_ids for each in sampling]
    client = served.client(speculative=GUESSING)
    for each, answer in zip(sampling, plain, strict=True):
        foretold([answer] * len(PROMPTS))
        assert client.generate(PROMPTS[:1], each)[0].token_ids == answer
    assert len({tuple(tokens) for tokens in plain}) > 8
    assert client.engine.stats().accepted_tokens_total > 0


def _assert_same_scores(ours: Answer, theirs: Answer) -> None:
    assert [score.token_id for score in ours.logprobs] == [score.token_id for score in theirs.logprobs]
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
