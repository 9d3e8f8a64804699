"""The whole stack in one process, without Ray: HTTP application, engine thread, real model.

with serving(folder) as server:
    server.post("/v1/completions", {...})
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from router.build import build_service
from router.dispatch.interface import GroupState, PairState
from router.http.app import create_app
from router.serving.service import Service
from router.settings import RouterSettings
from router.text.tokenizer import TextTokenizer
from tests.dispatcher_double import DispatcherDouble
from tests.models.checkpoints import successor
from tests.models.toy_tokenizers import byte_tokenizer
from tests.unit.router.client import CHAT, COMPLETIONS, call, events, streamed_text
from tests.unit.router.fakes import Stack
from workers.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpeculativeConfig,
)
from workers.engine.engine import Engine
from workers.engine.loop import EngineLoop, StepOutput
from workers.report import GroupReport
from workers.runtime.launch import LocalGroup
from workers.structured.available import open_backend
from workers.types import GenerateRequest, GroupId, GroupInfo, GroupStats, RequestId, Role, TokenChunk

MODEL = "model"


class LocalDispatcher(DispatcherDouble):
    """Over an engine in a thread of this process. Any event loop may use it."""

    def __init__(self, engine: Engine, info: GroupInfo) -> None:
        self.known_pairs: tuple[PairState, ...] = ()  # what it says of groups that read from each other
        self._info = info
        self._stats = GroupStats()
        self._report = GroupReport()
        self._waiting: dict[RequestId, tuple[asyncio.AbstractEventLoop, asyncio.Queue[TokenChunk]]] = {}
        self._loop = EngineLoop(engine, self._on_output)
        self._loop.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Ends after the last choice; closing it early aborts."""
        queue: asyncio.Queue[TokenChunk] = asyncio.Queue()
        self._waiting[request.request_id] = (asyncio.get_running_loop(), queue)
        self._loop.submit(request)
        unfinished = request.num_choices
        try:
            while unfinished:
                async with asyncio.timeout(60):
                    chunk = await queue.get()
                unfinished -= chunk.finish_reason is not None
                yield chunk
        finally:
            del self._waiting[request.request_id]
            if unfinished:
                self._loop.abort(request.request_id)

    def groups(self) -> Sequence[GroupState]:
        return (
            GroupState(
                group_id=self._info.group_id,
                epoch=self._info.epoch,
                info=self._info,
                stats=self._stats,
                is_ready=self._loop.is_alive,
                report=self._report,
            ),
        )

    def pairs(self) -> Sequence[PairState]:
        return self.known_pairs

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting)

    @property
    def stats(self) -> GroupStats:
        """Of the last step."""
        return self._stats

    def close(self) -> None:
        self._loop.stop(10)
        assert not self._loop.is_alive

    def _on_output(self, output: StepOutput) -> None:
        self._stats = output.stats
        self._report = output.report or self._report
        for chunk in output.chunks:
            waiting = self._waiting.get(chunk.request_id)
            if waiting is not None:
                loop, queue = waiting
                loop.call_soon_threadsafe(queue.put_nowait, chunk)


@dataclass
class Serving:
    """A running stack, and the calls that cases make."""

    service: Service
    dispatcher: LocalDispatcher
    engine: Engine
    tokenizer: TextTokenizer
    info: GroupInfo
    stack: Stack[LocalDispatcher]

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """One request as it is."""
        return call(self.stack.app, path, body)

    def whole(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A non-streaming answer; must be 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert isinstance(answer, dict)
        return answer

    def streamed(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The events of a stream with usage; must end with [DONE]."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = self.post(path, {**body, **options})
        assert response.status_code == 200, response.text
        found = events(response.text)
        assert found[-1] == "[DONE]"
        return found

    def both(self, path: str, body: Mapping[str, Any]) -> Answer:
        """The answer, after checking that it is the same streamed and not."""
        whole, found = self.whole(path, body), self.streamed(path, body)
        choice = whole["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        deltas = [
            c["delta"].get("content", "") if path == CHAT else c["text"]
            for e in found[:-1]
            for c in e["choices"]
        ]
        reasons = [c["finish_reason"] for e in found[:-1] for c in e["choices"]]
        assert streamed_text(found) == text
        assert reasons[-1] == choice["finish_reason"] and set(reasons[:-1]) <= {None}
        usage = found[-2]["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == whole["usage"][name]
        return Answer(text, choice["finish_reason"], whole["usage"], deltas)

    def ids(self, body: Mapping[str, Any]) -> list[int]:
        """Generated token ids of a completion."""
        answer = self.whole(COMPLETIONS, {**body, "return_token_ids": True})
        ids = answer["choices"][0]["token_ids"]
        assert isinstance(ids, list)
        return ids

    def idle(self, timeout_s: float = 10.0) -> GroupStats:
        """Stats once nothing runs; checks that no block has leaked."""
        deadline = time.monotonic() + timeout_s
        while (stats := self.dispatcher.stats).num_running or stats.num_waiting or stats.active_blocks:
            assert time.monotonic() < deadline, stats
            time.sleep(0.005)
        self.engine.check_integrity()
        return stats


@dataclass(frozen=True)
class Answer:
    """The text of one choice, and the pieces in which it was streamed."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    deltas: list[str]


@contextmanager
def running_engine(
    folder: Path,
    *,
    group: str = "local",
    tensor_parallel: int = 1,
    max_model_len: int | None = None,
    num_blocks: int = 512,
    max_running: int = 64,
    max_step_tokens: int = 512,
    block_size: int = 16,
    speculative: SpeculativeConfig | None = None,
) -> Iterator[tuple[LocalDispatcher, Engine, GroupInfo]]:
    """An engine over a checkpoint in float32, in a thread."""
    config = GroupConfig(
        model=ModelConfig(path=str(folder), dtype="float32", max_model_len=max_model_len),
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
        schedule=ScheduleConfig(max_running=max_running, max_step_tokens=max_step_tokens),
        parallel=ParallelConfig(tensor_parallel=tensor_parallel, threads_per_rank=1, device="cpu"),
    )
    with LocalGroup(config, on_failure=lambda reason: None) as local:
        facts = local.facts
        engine = Engine(
            limits=facts.limits,
            cache=replace(config.cache, block_size=facts.block_size),
            schedule=config.schedule,
            executor=local.executor,
            speculative=speculative,
            grammars=open_backend(folder, facts.limits.vocab_size),
        )
        info = GroupInfo(
            group_id=GroupId(group),
            epoch=1,
            role=Role.UNIFIED,
            model=MODEL,
            model_hash=facts.model_hash,
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            tensor_parallel=tensor_parallel,
            vocab_size=facts.limits.vocab_size,
            max_model_len=facts.limits.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            kv_bytes_per_block=facts.kv_bytes_per_block,
        )
        dispatcher = LocalDispatcher(engine, info)
        try:
            yield dispatcher, engine, info
        finally:
            dispatcher.close()


@contextmanager
def serving(
    folder: Path,
    *,
    tensor_parallel: int = 1,
    max_model_len: int | None = None,
    num_blocks: int = 512,
    max_running: int = 64,
    max_step_tokens: int = 512,
    block_size: int = 16,
    speculative: SpeculativeConfig | None = None,
    **settings: Any,
) -> Iterator[Serving]:
    """A stack over a checkpoint in float32. `settings`: fields of RouterSettings."""
    with running_engine(
        folder,
        tensor_parallel=tensor_parallel,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        block_size=block_size,
        speculative=speculative,
    ) as (dispatcher, engine, info):
        router_settings = replace(RouterSettings(model_name=MODEL), **settings)
        tokenizer = TextTokenizer.load(folder)
        service = build_service(dispatcher, tokenizer, router_settings)
        app = create_app(service, router_settings)
        try:
            yield Serving(service, dispatcher, engine, tokenizer, info, Stack(app, service, dispatcher))
        finally:
            service.close()


def endless_letters(folder: Path) -> Path:
    """A checkpoint that says a, b ... z, a ... for ever."""
    tokenizer = byte_tokenizer()
    perm = list(range(len(tokenizer)))
    first, last = tokenizer("a").input_ids[0], tokenizer("z").input_ids[0]
    for id in range(first, last + 1):
        perm[id] = id + 1 if id < last else first
    return successor(folder, perm, tokenizer=tokenizer, max_position_embeddings=32_768)
