"""A dispatcher with scripted tokens, and a service over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Generic, TypeVar

from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from router.build import build_service
from router.dispatch.interface import Decision, FetchCounts, GroupState, PairState, RouteCounts, Unavailable
from router.http.app import create_app
from router.serving.service import Service
from router.settings import RouterSettings
from router.text.tokenizer import TextTokenizer
from tests.dispatcher_double import DispatcherDouble
from workers.types import (
    FinishReason,
    GenerateRequest,
    GroupId,
    GroupInfo,
    GroupStats,
    RequestId,
    Role,
    TokenChunk,
    TokenLogprob,
)

MODEL = "toy"
SPECIALS = ("<s>", "</s>", "<eot>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<eot>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
INFO = GroupInfo(
    group_id=GroupId("g0"),
    epoch=1,
    role=Role.UNIFIED,
    model=MODEL,
    model_hash="0123456789abcdef0123",
    dtype="float32",
    kv_dtype="float32",
    tensor_parallel=1,
    vocab_size=259,
    max_model_len=4096,
    block_size=16,
    num_blocks=64,
    kv_bytes_per_block=1024,
)
READY = GroupState(group_id=INFO.group_id, epoch=INFO.epoch, info=INFO, stats=GroupStats(), is_ready=True)

Script = Callable[[GenerateRequest], Iterator[TokenChunk]]


@cache
def byte_tokenizer() -> TextTokenizer:
    """One token a byte; ids 0 to 2 are <s>, </s>, <eot>."""
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return TextTokenizer(
        tokenizer, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=TEMPLATE
    )


def says(text: str, *, cached: int = 0) -> Script:
    """Every choice says `text`, one byte a chunk, then </s>, unless max_tokens ends it."""

    def script(request: GenerateRequest) -> Iterator[TokenChunk]:
        ids = [*byte_tokenizer().encode(text), 1]
        return chunks_of(request, ids, cached=cached)

    return script


def chunks_of(request: GenerateRequest, ids: Sequence[int], *, cached: int = 0) -> Iterator[TokenChunk]:
    """One chunk a token, choices in turn, as an engine sends them."""
    budget = request.sampling.max_tokens
    count = max(1, min(len(ids), budget))
    for i in range(count):
        for choice in range(request.num_choices):
            is_last = i == count - 1
            stopped = is_last and budget >= len(ids)
            tokens = () if budget == 0 else (ids[i],)
            yield TokenChunk(
                request_id=request.request_id,
                choice=choice,
                token_ids=tokens,
                logprobs=_logprobs(request, tokens),
                prompt_logprobs=_prompt_logprobs(request) if i == 0 and choice == 0 else None,
                num_cached_tokens=cached if i == 0 else 0,
                finish_reason=(FinishReason.STOP if stopped else FinishReason.LENGTH) if is_last else None,
                stop_token_id=ids[i] if stopped else None,
            )


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple(((token_id + k) % INFO.vocab_size, -0.5 - k) for k in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=top)


def _logprobs(request: GenerateRequest, tokens: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
    wanted = request.sampling.num_logprobs
    return None if wanted is None else tuple(_logprob(token, wanted) for token in tokens)


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob | None, ...] | None:
    wanted = request.sampling.num_prompt_logprobs
    if wanted is None:
        return None
    return (None, *(_logprob(token, wanted) for token in request.prompt_token_ids[1:]))


@dataclass
class FakeDispatcher(DispatcherDouble):
    """Says what its script says. `gate`: when set, chunks wait for it (a queue, a slow model)."""

    script: Script = field(default_factory=lambda: says("hello"))
    states: Sequence[GroupState] = (READY,)
    gate: asyncio.Semaphore | None = None
    error: Exception | None = None  # raised before the first chunk
    requests: list[GenerateRequest] = field(default_factory=list)
    decisions: dict[RequestId, Decision] = field(default_factory=dict)
    known_pairs: Sequence[PairState] = ()
    fetches: FetchCounts = field(default_factory=FetchCounts)
    routes: RouteCounts = field(default_factory=RouteCounts)
    comes: asyncio.Event | None = None  # set: a group is there, READY; None: none is on its way
    max_wait_s: float = 60.0  # for it
    num_open: int = 0
    num_cancelled: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """router.dispatch.interface.Dispatcher."""
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        self.num_open += 1
        complete = False
        try:
            for chunk in self.script(request):
                if self.gate is not None:
                    await self.gate.acquire()
                else:
                    await asyncio.sleep(0)
                yield chunk
            complete = True
        finally:
            self.num_open -= 1
            self.num_cancelled += not complete

    async def available(self) -> None:
        """router.dispatch.interface.Dispatcher."""
        try:
            async with asyncio.timeout(self.max_wait_s if self.comes is not None else 0):
                await (self.comes or asyncio.Event()).wait()
        except TimeoutError:
            raise Unavailable("No worker group is there.", code="no_ready_group") from None
        self.states = (READY,)

    def explain(self, request_id: RequestId) -> Decision | None:
        """router.dispatch.interface.Dispatcher."""
        return self.decisions.get(request_id)

    def groups(self) -> Sequence[GroupState]:
        """router.dispatch.interface.Dispatcher."""
        return self.states

    def pairs(self) -> Sequence[PairState]:
        """router.dispatch.interface.Dispatcher."""
        return self.known_pairs

    def fetch_counts(self) -> FetchCounts:
        """router.dispatch.interface.Dispatcher."""
        return self.fetches

    def route_counts(self) -> RouteCounts:
        """router.dispatch.interface.Dispatcher."""
        return self.routes


D = TypeVar("D", bound=DispatcherDouble)


@dataclass
class Stack(Generic[D]):
    """A whole router over a double of the dispatcher."""

    app: FastAPI
    service: Service
    dispatcher: D


def stack(
    dispatcher: FakeDispatcher | None = None, *, tokenizer: TextTokenizer | None = None, **overrides: object
) -> Stack[FakeDispatcher]:
    """`overrides`: fields of RouterSettings."""
    dispatcher = dispatcher or FakeDispatcher()
    settings = replace(RouterSettings(model_name=MODEL), **overrides)  # type: ignore[arg-type]
    service = build_service(dispatcher, tokenizer or byte_tokenizer(), settings)
    return Stack(create_app(service, settings), service, dispatcher)
