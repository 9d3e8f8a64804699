"""Answers that follow a grammar are the same on one rank and on two, with guesses and without."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.checkpoints import build, family, prompt_ids
from tests.models.engine_groups import start_group
from tests.models.toy_tokenizers import byte_tokenizer
from workers.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from workers.engine.engine import Engine
from workers.runtime.launch import LocalGroup
from workers.structured.available import open_backend
from workers.structured.matching import LlguidanceState
from workers.types import GenerateRequest, Grammar, GrammarKind, RequestId, SamplingParams

PATTERN = r'(\{"a":(1|2),"b":"[xy]{3}"\}){1,4}'
METHODS = ("none", "prompt_lookup")


def engine_of(
    folder: Path, group: LocalGroup, method: str, clock: Callable[[], float] = time.monotonic
) -> Engine:
    return Engine(
        limits=group.facts.limits,
        cache=CacheConfig(block_size=group.facts.block_size),
        schedule=ScheduleConfig(max_step_tokens=24),
        executor=group.executor,
        speculative=SpeculativeConfig(method=method),
        grammars=open_backend(folder, group.facts.limits.vocab_size),
        clock=clock,
    )


def tokens_of(engine: Engine, *requests: GenerateRequest) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for chunk in engine.step():
            assert chunk.error is None
            found.setdefault((chunk.request_id, chunk.choice), []).extend(chunk.token_ids)
    return found


def answers(folder: Path, group: LocalGroup, method: str) -> dict[tuple[str, int], list[int]]:
    engine = engine_of(folder, group, method)
    requests = [
        GenerateRequest(
            request_id=RequestId(str(number)),
            prompt_token_ids=tuple(prompt_ids(37, 259, seed=number)),
            sampling=SamplingParams(max_tokens=90, temperature=1.0, seed=number),
            num_choices=2,
            grammar=Grammar(kind=GrammarKind.REGEX, text=PATTERN),
        )
        for number in range(3)
    ]
    found = tokens_of(engine, *requests)
    assert method == "none" or engine.stats().accepted_tokens_total > 50
    return found


def test_guesses_that_no_grammar_has_room_for_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many states as the answers need, and not what follows wrong guesses too."""
    monkeypatch.setattr("workers.structured.backend._MAX_LEXER_STATES", 30)
    build(tmp_path, family("llama"), vocab_size=259)
    byte_tokenizer().save_pretrained(tmp_path)
    request = GenerateRequest(
        request_id=RequestId("a"),
        prompt_token_ids=tuple(prompt_ids(37, 259)),
        sampling=SamplingParams(max_tokens=12, temperature=1.0, seed=3),
        num_choices=8,
        grammar=Grammar(kind=GrammarKind.REGEX, text="[ab]*|[ab]*a[ab]{30}c"),
    )
    ended, end_guesses = [], LlguidanceState._end_guesses

    def note(state: LlguidanceState) -> None:
        ended.append(state)
        end_guesses(state)

    monkeypatch.setattr(LlguidanceState, "_end_guesses", note)
    with start_group(tmp_path, 1) as group:
        plain = engine_of(tmp_path, group, "none")
        guessed = engine_of(tmp_path, group, "lookahead", clock=lambda: 0.0)  # as often as it is allowed
        assert tokens_of(guessed, request) == tokens_of(plain, request)
    assert guessed.stats().drafted_tokens_total > 0 and ended


def test_on_two_ranks_and_with_guesses(tmp_path: Path) -> None:
    build(tmp_path, family("llama"), vocab_size=259)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    found = []
    for tensor_parallel in (1, 2):
        with start_group(tmp_path, tensor_parallel) as group:
            found += [answers(tmp_path, group, method) for method in METHODS]
    assert all(each == found[0] for each in found)
    for token_ids in found[0].values():
        assert re.fullmatch(PATTERN, tokenizer.decode(token_ids))
