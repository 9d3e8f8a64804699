"""Fake groups that read cached blocks from each other, and pools of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from router.dispatch.dispatcher import SocketDispatcher
from router.routing.policy import PlacementPolicy, PolicyConfig
from tests.unit.data_plane.fakes import (
    BLOCK_SIZE,
    Cluster,
    FakeEngine,
    FakeGroup,
    expected_tokens,
    info,
    with_cluster,
)
from workers.engine.loop import StepOutput
from workers.hashing import BlockHash, block_hashes
from workers.types import (
    FinishReason,
    GenerateRequest,
    GroupStats,
    KVSource,
    RequestId,
    Role,
    TokenChunk,
)

LONG = tuple(range(1000, 1400))  # a hundred blocks, of which 99 can be read
RIGHT = expected_tokens(LONG, 0, 3)
ROUND_ROBIN = PolicyConfig(policy=PlacementPolicy.ROUND_ROBIN)
_HEARD_AFTER_S = 0.01  # the router has heard before


@dataclass
class _Job:
    request: GenerateRequest
    source: KVSource | None
    num_done: int = 0
    has_begun: bool = False


class PooledEngine(FakeEngine):
    """A step begins every request whose source has all it will have, and makes a token for every choice of
    those that have begun. Without its source a request waits for a REDIRECT, unless the engine `gives_up`."""

    def __init__(self, engines: dict[str, PooledEngine], name: str) -> None:
        super().__init__()
        self.name = name
        self.engines = engines  # those that can be reached
        self.jobs: dict[RequestId, _Job] = {}
        self.requests: list[GenerateRequest] = []  # all that ever came, without canaries
        self.redirects: list[tuple[RequestId, str | None]] = []  # (request, group id of the new source)
        self.num_computed: dict[RequestId, int] = {}  # prompt tokens computed here
        self.transfers: dict[str, float] = {}  # of requests that have ended, to when the others hear of it
        self.gives_up = False
        engines[name] = self

    def submit(self, request: GenerateRequest) -> None:
        with self._lock:
            self.submitted.append(request.request_id)
            self.jobs[request.request_id] = _Job(request, request.kv_source)
            if not request.request_id.startswith("canary"):
                self.requests.append(request)

    def abort(self, request_id: RequestId) -> None:
        with self._lock:
            self.aborted.append(request_id)
            self._end(self.jobs.pop(request_id, None))

    def redirect(self, request_id: RequestId, source: KVSource | None) -> None:
        with self._lock:
            self.redirects.append((request_id, source.group_id if source is not None else None))
            if (job := self.jobs.get(request_id)) is not None:
                job.source = source

    def leave(self) -> None:
        """Others cannot reach it any more."""
        self.engines.pop(self.name, None)

    def step(self, *, failure: str | None = None) -> StepOutput:
        """One step."""
        with self._lock:
            chunks: list[TokenChunk] = []
            for job in list(self.jobs.values()):
                chunks += self._run_job(job)
            self.num_steps += 1
            output = StepOutput(
                chunks=tuple(chunks),
                events=tuple(self._pending),
                stats=GroupStats(num_running=len(self.jobs), num_steps=self.num_steps, step_seconds=1e-4),
                failure=failure,
            )
            self._pending.clear()
        assert self.on_output is not None
        self.on_output(output)
        return output

    def _run(self, step_s: float) -> None:
        while not self._stop.wait(step_s):
            if (self.jobs or self._pending) and not self.is_paused:
                self.step()

    def _run_job(self, job: _Job) -> list[TokenChunk]:
        request, num_cached = job.request, 0
        if not job.has_begun:
            if not self._fetch(job):
                return []
            num_cached = self._begin(job)
        job.num_done += 1
        wanted = request.sampling.max_tokens
        if is_last := job.num_done >= wanted:
            self._end(self.jobs.pop(request.request_id))
        return [
            TokenChunk(
                request_id=request.request_id,
                choice=choice,
                token_ids=tuple(expected_tokens(request.prompt_token_ids, choice, job.num_done)[-1:])
                if wanted
                else (),
                num_cached_tokens=num_cached,
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
            for choice in range(request.num_choices)
        ]

    def _fetch(self, job: _Job) -> bool:
        """Copies what the source has. False: the request goes on waiting."""
        source = job.source
        if source is None:
            return True
        peer = self.engines.get(source.group_id)
        if peer is None:
            return self.gives_up
        if source.transfer_id is not None:
            known_s = peer.transfers.get(source.transfer_id, float("inf"))
            if time.monotonic() < known_s:
                return self.gives_up
        found = 0
        chain = self._usable(job.request)
        while found < len(chain) and chain[found] in peer.cached:
            found += 1
        if new := [h for h in chain[:found] if h not in self.cached]:
            self._store(new)
        return True

    def _begin(self, job: _Job) -> int:
        """Computes what is not cached; gives the cached tokens."""
        job.has_begun = True
        chain = self._usable(job.request)
        found = next((i for i, h in enumerate(chain) if h not in self.cached), len(chain))
        self.num_computed[job.request.request_id] = len(job.request.prompt_token_ids) - found * BLOCK_SIZE
        whole = block_hashes(job.request.prompt_token_ids, BLOCK_SIZE, job.request.cache_salt)
        if new := [h for h in whole if h not in self.cached]:
            self._store(new)
        return found * BLOCK_SIZE

    def _end(self, job: _Job | None) -> None:
        if job is not None and job.request.transfer_id is not None:
            self.transfers[job.request.transfer_id] = time.monotonic() + _HEARD_AFTER_S

    def _usable(self, request: GenerateRequest) -> list[BlockHash]:
        prompt = request.prompt_token_ids
        return block_hashes(prompt[: len(prompt) - 1], BLOCK_SIZE, request.cache_salt)


@dataclass
class Pools:
    """Groups by name: p... prefill, d... decode, u... unified."""

    groups: Cluster
    engines: dict[str, PooledEngine]

    async def add(self, name: str, *, steps: bool = True, **facts: object) -> PooledEngine:
        """`facts`: fields of its GroupInfo."""
        role = {"p": Role.PREFILL, "d": Role.DECODE, "u": Role.UNIFIED}[name[0]]
        described = replace(info(name), **{"role": role, "exchanges_kv": True, **facts})  # type: ignore[arg-type]
        engine = PooledEngine(self.engines, name)
        await self.groups.add_group(name, steps=steps, engine=engine, described=described)
        return engine

    def group(self, name: str) -> FakeGroup:
        return self.groups.groups[name]

    async def kill(self, name: str) -> None:
        """The group dies: nobody reaches it, its connections end."""
        engine = self.engines[name]
        engine.leave()
        engine.is_paused = True
        engine.jobs.clear()
        engine.step(failure="killed")


def with_pools(test: Callable[[Pools], Coroutine[Any, Any, None]]) -> None:
    """Runs a test over pools without groups yet."""

    async def body(groups: Cluster) -> None:
        await test(Pools(groups, {}))

    with_cluster(body)


async def started(pools: Pools, *names: str) -> tuple[SocketDispatcher, list[PooledEngine]]:
    """A router that takes groups in turn: the first request goes to the second ones by name, if there are
    two."""
    engines = [await pools.add(name) for name in names]
    return await pools.groups.add_router(policy=ROUND_ROBIN), engines


def quiet(*engines: PooledEngine) -> bool:
    return not any(engine.jobs for engine in engines)


def outcomes(router: SocketDispatcher, name: str = "r") -> list[tuple[str, str]] | None:
    decision = router.explain(RequestId(name))
    fetch = decision.fetch if decision is not None else None
    return [(str(group), how) for group, how in fetch.prefills] if fetch is not None else None
