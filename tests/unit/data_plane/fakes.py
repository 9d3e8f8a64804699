"""A group without a model: an engine whose tokens follow from the prompt, behind the real server and
sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.dispatch.dispatcher import DispatchLimits, SocketDispatcher
from router.dispatch.groups import GroupLimits
from router.dispatch.link import LinkLimits
from router.routing.policy import PolicyConfig
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.lease_server import LeaseServer
from workers.data_plane.server import StreamServer
from workers.data_plane.server_terms import ServerLimits
from workers.data_plane.submit import SubmitClient, SubmitRefused
from workers.engine.loop import StepOutput
from workers.hashing import BlockHash, block_hashes
from workers.types import (
    BlockEvent,
    BlockEventKind,
    FinishReason,
    GenerateRequest,
    GroupAddress,
    GroupId,
    GroupInfo,
    GroupStats,
    KVSource,
    RequestId,
    Role,
    SamplingParams,
    TokenChunk,
)

SECRET = b"a secret of the application"
BLOCK_SIZE = 4

FAST = DispatchLimits(
    send_timeout_s=0.5,
    move_wait_s=1.0,
    stopped_wait_s=0.5,
    start_wait_s=1.0,
    successor_s=0.0,
    groups=GroupLimits(
        poll_s=0.02,
        source_timeout_s=1.0,
        canary_timeout_s=2.0,
        backoff_s=0.02,
        max_backoff_s=0.1,
        forget_after_s=0.1,
        link=LinkLimits(connect_timeout_s=1.0, dead_after_s=0.6, check_period_s=0.05),
    ),
)
FAST_SERVER = ServerLimits(heartbeat_s=0.1, dead_after_s=1.0, greeting_timeout_s=3.0, stats_period_s=0.01)


def run(test: Coroutine[Any, Any, None], timeout_s: float = 10.0) -> None:
    """Runs a test's coroutine, never for ever."""
    asyncio.run(asyncio.wait_for(test, timeout_s))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for something that other tasks and threads bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (threads have no asyncio events)
            await asyncio.sleep(0.002)


def info(name: str = "g1", epoch: int = 1, num_blocks: int = 1000) -> GroupInfo:
    return GroupInfo(
        group_id=GroupId(name),
        epoch=epoch,
        role=Role.UNIFIED,
        model="tiny",
        model_hash="00",
        dtype="float32",
        kv_dtype="float32",
        tensor_parallel=1,
        vocab_size=100_000,
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        kv_bytes_per_block=64,
    )


def request(
    name: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 3, num_choices: int = 1
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        num_choices=num_choices,
    )


def expected_tokens(prompt: Sequence[int], choice: int, count: int) -> list[int]:
    """What the fake engine answers."""
    return [(sum(prompt) * 31 + choice * 1000 + position) % 100_000 for position in range(count)]


class _Running:
    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.num_done = {choice: len(begun) for choice, begun in request.choices().items()}

    def advance(self) -> list[TokenChunk]:
        """The next token of every choice that goes on."""
        request, chunks = self.request, []
        for choice, position in list(self.num_done.items()):
            ends = position + 1 >= request.sampling.max_tokens
            chunks.append(
                TokenChunk(
                    request_id=request.request_id,
                    choice=choice,
                    token_ids=(expected_tokens(request.prompt_token_ids, choice, position + 1)[-1],),
                    finish_reason=FinishReason.LENGTH if ends else None,
                )
            )
            if ends:
                del self.num_done[choice]
            else:
                self.num_done[choice] += 1
        return chunks


class FakeEngine:
    """Takes requests like an EngineLoop; a step, called or in a thread, makes a token for every choice."""

    def __init__(self) -> None:
        self.on_output: Callable[[StepOutput], None] | None = None
        self.running: dict[RequestId, _Running] = {}
        self.submitted: list[RequestId] = []
        self.aborted: list[RequestId] = []
        self.cached: set[BlockHash] = set()
        self.number = 0  # of the last block event
        self.num_steps = 0
        self.is_paused = False
        self._pending: list[BlockEvent] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, request: GenerateRequest) -> None:
        with self._lock:
            self.submitted.append(request.request_id)
            self.running[request.request_id] = _Running(request)
            new = [h for h in block_hashes(request.prompt_token_ids, BLOCK_SIZE, request.cache_salt)
                   if h not in self.cached]  # fmt: skip
            if new:
                self._store(new)

    def abort(self, request_id: RequestId) -> None:
        with self._lock:
            self.aborted.append(request_id)
            self.running.pop(request_id, None)

    def redirect(self, request_id: RequestId, source: KVSource | None) -> None:
        """It reads nothing of others."""

    def store(self, hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            self._store(list(hashes))

    def evict(self, hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            gone = tuple(hashes)
            self.cached -= set(gone)
            self._log(BlockEventKind.REMOVED, gone)

    def lose_event(self) -> None:
        """The log goes on with a number missing."""
        self.number += 1

    def step(self, *, failure: str | None = None) -> StepOutput:
        """One step: a token for every choice of every request."""
        with self._lock:
            chunks = []
            for request_id, running in list(self.running.items()):
                chunks += running.advance()
                if not running.num_done:
                    del self.running[request_id]
            self.num_steps += 1
            output = StepOutput(
                chunks=tuple(chunks),
                events=tuple(self._pending),
                stats=GroupStats(num_running=len(self.running), num_steps=self.num_steps, step_seconds=1e-4),
                failure=failure,
            )
            self._pending.clear()
        assert self.on_output is not None
        self.on_output(output)
        return output

    def start(self, step_s: float = 0.001) -> None:
        self._thread = threading.Thread(target=self._run, args=(step_s,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
            assert not self._thread.is_alive()

    def _run(self, step_s: float) -> None:
        while not self._stop.wait(step_s):
            if (self.running or self._pending) and not self.is_paused:
                self.step()

    def _store(self, hashes: list[BlockHash]) -> None:
        self.cached |= set(hashes)
        self._log(BlockEventKind.STORED, tuple(hashes))

    def _log(self, kind: BlockEventKind, hashes: tuple[BlockHash, ...]) -> None:
        self.number += 1
        self._pending.append(BlockEvent(number=self.number, kind=kind, block_hashes=hashes))


@dataclass
class FakeGroup:
    """A served epoch of a fake group with its front."""

    engine: FakeEngine
    server: StreamServer
    address: GroupAddress
    front: SubmitClient

    async def stop(self) -> None:
        self.front.close()
        self.engine.stop()
        await self.server.stop("the group stops")


async def start_group(
    name: str = "g1",
    epoch: int = 1,
    *,
    limits: ServerLimits = FAST_SERVER,
    steps: bool = True,
    engine: FakeEngine | None = None,
    described: GroupInfo | None = None,
    lease_server: LeaseServer | None = None,
) -> FakeGroup:
    """A group on a loopback port; `steps`: its engine runs by itself."""
    engine = engine or FakeEngine()
    described = described or info(name, epoch)
    server = StreamServer(
        info=described, secret=SECRET, limits=limits, on_redirect=engine.redirect, lease_server=lease_server
    )
    engine.on_output = server.on_output
    host, port = await server.start(engine, "127.0.0.1")
    front = SubmitClient(ClientIdentity(client_id=f"front-{name}", secret=SECRET, subscribes=False))
    await front.connect(host, port)
    if steps:
        engine.start()
    address = GroupAddress(
        group_id=GroupId(name), replica_id=name, host=host, port=port, role=described.role, epoch=epoch
    )
    return FakeGroup(engine, server, address, front)


@dataclass
class Cluster:
    """Fake groups, what the directory lists, and routers."""

    stack: AsyncExitStack
    groups: dict[str, FakeGroup] = field(default_factory=dict)
    listed: list[GroupAddress] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)  # groups whose front takes nothing
    sent: list[tuple[RequestId, GroupId]] = field(default_factory=list)  # accepted requests

    async def add_group(
        self,
        name: str,
        epoch: int = 1,
        *,
        steps: bool = True,
        engine: FakeEngine | None = None,
        described: GroupInfo | None = None,
    ) -> FakeGroup:
        group = await start_group(name, epoch, steps=steps, engine=engine, described=described)
        self.stack.push_async_callback(group.stop)
        self.groups[name] = group
        self.listed = [a for a in self.listed if a.group_id != name] + [group.address]
        return group

    async def add_router(
        self,
        *,
        policy: PolicyConfig | None = None,
        limits: DispatchLimits = FAST,
        send: Callable[[Sequence[GroupId], str, GenerateRequest], Awaitable[GroupId]] | None = None,
        ready: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> SocketDispatcher:
        router = SocketDispatcher(
            secret=SECRET, source=self.list, send=send or self.send, policy=policy, limits=limits, clock=clock
        )
        await router.start()
        self.stack.push_async_callback(router.stop)
        wanted = len(self.groups) if ready is None else ready
        await until(lambda: sum(state.is_ready for state in router.groups()) == wanted)
        return router

    async def list(self) -> Sequence[GroupAddress]:
        return list(self.listed)

    async def send(self, order: Sequence[GroupId], client_id: str, request: GenerateRequest) -> GroupId:
        """What the Serve handle does: the first group of the order, through its front."""
        name = order[0]
        if name in self.refuse:
            raise SubmitRefused("the front takes nothing", code="not_connected")
        await self.groups[name].front.submit(client_id, request)
        self.sent.append((request.request_id, name))
        return name


@asynccontextmanager
async def serving(
    limits: ServerLimits = FAST_SERVER, *, steps: bool = False, lease_server: LeaseServer | None = None
) -> AsyncIterator[FakeGroup]:
    """A group behind its server, stopped at the end."""
    group = await start_group(limits=limits, steps=steps, lease_server=lease_server)
    try:
        yield group
    finally:
        await group.stop()


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack)


def with_cluster(test: Callable[[Cluster], Coroutine[Any, Any, None]], timeout_s: float = 10.0) -> None:
    async def body() -> None:
        async with cluster() as groups:
            await test(groups)

    run(body(), timeout_s)


async def collect(router: SocketDispatcher, wanted: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in router.generate(wanted)]


def tokens(chunks: Sequence[TokenChunk], choice: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.choice == choice for token in chunk.token_ids]
