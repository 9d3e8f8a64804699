"""Long prompts in chunks: answers under way go on, and no result depends on where they are cut (B29)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.models import embedded
from tests.cases.serving import COMPLETIONS, LocalDispatcher, Serving, running_engine, serving
from tests.models.checkpoints import build, family, prompt_ids
from tests.models.oracle import Oracle
from tests.models.toy_tokenizers import byte_tokenizer
from tests.unit.data_plane.fakes import until
from workers.types import GenerateRequest, RequestId, SamplingParams

VOCAB_SIZE = 259
SCORED = prompt_ids(500, VOCAB_SIZE, seed=29)
STEP_TOKENS = (16, 17, 128, 4096)
LONG = 1024  # tokens of the prompt that comes in between: eight steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "llama"
    build(folder, family("llama"), vocab_size=VOCAB_SIZE, max_position_embeddings=600)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=STEP_TOKENS)
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    with serving(folder, max_step_tokens=request.param, num_blocks=128) as server:
        yield server
        server.idle()


@pytest.fixture(scope="module")
def scores(folder: Path) -> torch.Tensor:
    """(tokens, vocabulary): log-probabilities of what follows each token, from one forward pass."""
    return torch.log_softmax(Oracle(folder).logits(SCORED), dim=-1)


@pytest.fixture(scope="module")
def drawn() -> list[list[list[int]]]:
    """What the first server drew; the others must draw the same."""
    return []


def test_scores_of_a_prompt(server: Serving, scores: torch.Tensor) -> None:
    body = {"prompt": SCORED, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    found = server.whole(COMPLETIONS, body)["choices"][0]["logprobs"]["token_logprobs"]
    expected = scores[:-1].gather(1, torch.tensor(SCORED[1:])[:, None])[:, 0]
    assert found[0] is None
    assert found[1:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_penalties_and_two_choices(server: Serving, drawn: list[list[list[int]]]) -> None:
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9}
    bodies = [
        {"prompt": SCORED[:300], "temperature": 0, **penalties},
        {"prompt": SCORED[100:401], "temperature": 1.0, "seed": 4, "n": 2},
        {"prompt": SCORED[:257], "temperature": 1.0, "seed": 5, "n": 2, **penalties},
    ]
    answers = [server.whole(COMPLETIONS, common | body)["choices"] for body in bodies]
    drawn.append([choice["token_ids"] for choices in answers for choice in choices])
    assert [len(ids) for ids in drawn[-1]] == [12] * 5
    assert drawn[-1] == drawn[0]


def request(name: str, num_tokens: int, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt_ids(num_tokens, 40_000, seed=len(name))),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        cache_salt=name,
    )


async def moments(dispatcher: LocalDispatcher, wanted: GenerateRequest, into: list[float]) -> None:
    """When each token came."""
    async for chunk in dispatcher.generate(wanted):
        into += [time.monotonic()] * len(chunk.token_ids)


def test_a_running_answer_does_not_wait_for_a_long_prompt() -> None:
    """The longest gap between its tokens meanwhile is below a third of what the prompt takes alone."""

    async def test(dispatcher: LocalDispatcher) -> None:
        asked_s = time.monotonic()
        alone: list[float] = []
        await moments(dispatcher, request("alone", LONG, 1), alone)
        stream: list[float] = []
        running = asyncio.create_task(moments(dispatcher, request("stream", 20, 60), stream))
        await until(lambda: len(stream) >= 10)
        between_s = time.monotonic()
        beside: list[float] = []
        await moments(dispatcher, request("between", LONG, 1), beside)
        await running
        meanwhile = [moment for moment in stream if between_s <= moment <= beside[0]]
        assert len(meanwhile) >= LONG // 128  # a token with every chunk
        gaps = [after - before for before, after in pairwise(stream) if after > between_s]
        assert max(gaps) < (alone[0] - asked_s) / 3

    folder = embedded.ensure(print)
    with running_engine(folder, max_step_tokens=128, num_blocks=512) as (dispatcher, _, info):
        assert info.max_model_len > LONG
        asyncio.run(test(dispatcher))
