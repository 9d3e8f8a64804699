"""Beam searches equal transformers', tokens and scores, whatever the engine does on the way.

Widths, early stopping and length penalties are each combined with each once, spread over all families; what
else a request may have goes round with them. The searches of a family run in one engine at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.engine_groups import GREEDY, Client, group_config, start_group
from tests.models.families import CORE
from tests.models.oracle import BeamOptions, Oracle
from workers.runtime.launch import LocalGroup
from workers.types import BeamParams, EarlyStopping, FinishReason, RequestId, SamplingParams

NUM_TOKENS = 14
WIDTHS, PENALTIES = (1, 2, 4, 8), (-1.0, 0.0, 0.6, 1.0, 2.0)
EOS = (5, 17, 40, 77, 101, 120)  # so many that hypotheses end
OPTIONS = (
    BeamOptions(eos=EOS),
    BeamOptions(eos=EOS, min_tokens=6),
    BeamOptions(eos=EOS[:1], logit_bias=((EOS[0], 2.5), (9, -3.0))),
    BeamOptions(eos=EOS, repetition_penalty=1.3),
    BeamOptions(),
)
LENGTHS = (1, 7, 16, 17, 33, 40, 23)  # of prompts
NAMES = [entry.name for entry in CORE]


@dataclass(frozen=True)
class Case:
    """One search."""

    prompt: list[int]
    beam: BeamParams
    options: BeamOptions

    @property
    def sampling(self) -> SamplingParams:
        options = self.options
        return replace(
            GREEDY,
            max_tokens=NUM_TOKENS,
            min_tokens=options.min_tokens,
            repetition_penalty=options.repetition_penalty,
            logit_bias=options.logit_bias,
            stop_token_ids=options.eos,
        )


def all_cases() -> list[Case]:
    cases = []
    options, lengths = cycle(OPTIONS), cycle(LENGTHS)
    for number, (width, stopping, penalty) in enumerate(product(WIDTHS, EarlyStopping, PENALTIES)):
        beam = BeamParams(width=width, length_penalty=penalty, early_stopping=stopping)
        option = next(options) if number % len(OPTIONS) else islice(options, 1, 2).__next__()
        if width == 1:  # greedy, where penalties change logits and not log-probabilities
            option = replace(option, repetition_penalty=1.0)
        cases.append(Case(checkpoints.prompt_ids(next(lengths), seed=300 + number), beam, option))
    return cases


CASES = all_cases()


def check(client: Client, oracle: Oracle, cases: Sequence[Case]) -> None:
    ids: list[RequestId] = [
        client.submit(case.prompt, case.sampling, num_choices=case.beam.width, beam=case.beam)
        for case in cases
    ]
    answers = client.finish()
    for request_id, case in zip(ids, cases, strict=True):
        expected = oracle.beams(case.prompt, NUM_TOKENS, case.beam, case.options)
        found = [answers[request_id, choice] for choice in range(case.beam.width)]
        assert [answer.token_ids for answer in found] == [tokens for tokens, _ in expected], case
        for answer, (tokens, score) in zip(found, expected, strict=True):
            assert score is None or answer.score == pytest.approx(score, rel=1e-6, abs=1e-4), case
            has_ended = tokens[-1] in case.options.eos
            assert answer.finish is (FinishReason.STOP if has_ended else FinishReason.LENGTH)


def client_of(group: LocalGroup, **options: int | None) -> Client:
    return Client(group.facts, group.executor, **options)


@pytest.mark.parametrize("name", NAMES)
def test_as_transformers(name: str, family_folder: Callable[[str], Path]) -> None:
    folder = family_folder(name)
    with start_group(folder, 1, num_blocks=600) as group:
        cases = CASES[NAMES.index(name) :: len(NAMES)]
        check(client_of(group, max_prefill_chunk=7), Oracle(folder), cases)


def test_on_two_ranks(family_folder: Callable[[str], Path]) -> None:
    folder = family_folder("llama")
    with start_group(folder, 2) as group:
        check(client_of(group), Oracle(folder), [case for case in CASES if case.beam.width == 4][:3])


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_preempted(prefix_reuse: bool, family_folder: Callable[[str], Path]) -> None:
    """Memory is short, answers of one token are expected: searches go and come back."""
    folder = family_folder("qwen3")
    config = group_config(folder, 1)
    with LocalGroup(replace(config, cache=replace(config.cache, block_size=4))) as group:
        client = Client(
            group.facts, group.executor, num_blocks=30, prefix_reuse=prefix_reuse, expected_output_tokens=1
        )
        check(client, Oracle(folder), [case for case in CASES if case.beam.width == 4][:8])
    assert client.engine.stats().preemptions_total > 0


def test_in_bfloat16_a_score_is_that_of_its_tokens(family_folder: Callable[[str], Path]) -> None:
    """The step in one call of C++: each hypothesis has read its own keys and values, copied ones too."""
    config = group_config(family_folder("llama"), 1)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    with LocalGroup(config, on_failure=lambda reason: None) as group:
        client = client_of(group)
        prompt, beam = checkpoints.prompt_ids(21), BeamParams(width=6, length_penalty=0.0)
        request_id = client.submit(
            prompt, replace(GREEDY, max_tokens=20, num_logprobs=0), num_choices=6, beam=beam
        )
        answers = client.finish()
        for choice in range(6):
            answer = answers[request_id, choice]
            assert sum(score.logprob for score in answer.logprobs) == pytest.approx(answer.score, abs=1e-3)
            text = [*prompt, *answer.token_ids]
            (read,) = client.generate([text], replace(GREEDY, max_tokens=0, num_prompt_logprobs=0))
            assert read.prompt_logprobs is not None
            scores = [score.logprob for score in read.prompt_logprobs[len(prompt) :] if score is not None]
            assert [score.logprob for score in answer.logprobs] == pytest.approx(scores, abs=0.1)
