"""What a rank's process holds, without Ray: the rank itself, its part in the exchange of KV blocks with other
groups, and on rank 0 the engine and its server.

    leader = LeaderHost(start, host=...)    follower = FollowerHost(start, 1, leader.rendezvous)
    info = leader.load()                ||  follower.load()          # blocking, at the same time
    address = await leader.listen()
    reason = await leader.ended()       ||  follower.follow()
    await leader.stop(reason)           # followers end by themselves then

`load` and `follow` block: call them in a thread. Everything else belongs to the asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from workers.data_plane.server import StreamServer
from workers.engine.canary import Canary
from workers.engine.engine import Engine
from workers.engine.exchange import Redirect
from workers.engine.loop import EngineLoop, StepOutput
from workers.engine.meter import MeteredModel
from workers.exchange.rank_exchange import ExchangeImpossible, FollowerExchange, LeaderExchange
from workers.group_start import GroupStart
from workers.runtime.handshake import Rendezvous
from workers.runtime.rank import Follower, Leader, RankFacts, exit_process
from workers.structured.available import open_backend
from workers.types import GroupInfo, KVSource, RequestId

if TYPE_CHECKING:
    from workers.structured.backend import LlguidanceBackend

_STOP_TIMEOUT_S = 5.0  # for the engine to end the step it is in

_log = logging.getLogger(__name__)


class LeaderHost:
    """Rank 0: the engine's thread, and the server that streams its tokens."""

    def __init__(
        self, start: GroupStart, *, host: str, end_process: Callable[[str], None] = exit_process
    ) -> None:
        """host: IPv4 address of this machine that routers and the other ranks can reach.

        end_process is called in the watchdog's thread when a rank is lost: the process belongs to its group.
        """
        self._start = start
        self._host = host
        self._end_process = end_process
        self._asyncio_loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._asyncio_loop.create_future()
        self._leader = Leader(start.config, host=host, on_failure=self._on_failure)
        self._engine_loop: EngineLoop | None = None
        self._exchange: LeaderExchange | None = None
        self._metered: MeteredModel | None = None
        self._exchange_problem = ""  # why there is none
        self._grammars: LlguidanceBackend | None = None
        self._server: StreamServer | None = None

    @property
    def rendezvous(self) -> Rendezvous | None:
        """What the other ranks need; None for a group of one."""
        return self._leader.rendezvous if self._start.config.parallel.tensor_parallel > 1 else None

    def load(self) -> GroupInfo:
        """Load the weights, make the pool, compute a first step and the canary's prompt. Raises what
        `Leader.load` raises, GroupFailed also for an answer of numbers that are not finite."""
        facts = self._leader.load()
        self._grammars = open_backend(self._start.config.model.path, facts.limits.vocab_size)
        if self._grammars is not None:
            self._grammars.warm()  # now: it holds the interpreter, and the engine does not run yet
        self._metered = self._leader.metered()
        engine = self._exchanging_engine(facts) or self._engine(facts, None)
        exchange = self._exchange
        canary = Canary(facts.limits, time.monotonic)
        canary.prove(engine)
        self._engine_loop = EngineLoop(engine, self._on_output, canary)
        info = self._info(facts)
        self._server = StreamServer(
            info=info,
            secret=self._start.secret,
            on_redirect=self._redirect if exchange is not None else None,
            lease_server=exchange.lease_server if exchange is not None else None,
        )
        return info

    async def listen(self) -> tuple[str, int]:
        """Take requests; returns where."""
        assert self._server is not None and self._engine_loop is not None, "load() first"
        if self._exchange is not None:
            self._exchange.start(self._engine_loop)
        self._engine_loop.start()
        return await self._server.start(self._engine_loop, self._host)

    async def ended(self) -> str:
        """Return when the group can serve no more, with the reason."""
        return await asyncio.shield(self._ended)

    async def drain(self, timeout_s: float) -> int:
        """Wait until nobody waits for tokens or reads blocks any more; returns how many requests are left."""
        deadline = self._asyncio_loop.time() + timeout_s
        while (self.num_requests or self.num_leases) and self._asyncio_loop.time() < deadline:
            if self._ended.done():
                break
            await asyncio.sleep(0.05)
        return self.num_requests

    @property
    def num_requests(self) -> int:
        """Requests whose tokens somebody waits for."""
        return self._server.num_requests if self._server is not None else 0

    @property
    def num_leases(self) -> int:
        """Readers of this group's blocks."""
        return self._exchange.lease_server.num_leases if self._exchange is not None else 0

    async def stop(self, reason: str) -> None:
        """End requests with the reason, then the engine, then the exchange, then the other ranks."""
        async with AsyncExitStack() as rest:  # last first; all, also when one part fails
            rest.push_async_callback(asyncio.to_thread, self._leader.close)
            if self._exchange is not None:
                rest.push_async_callback(self._exchange.close)
            if self._engine_loop is not None:
                rest.push_async_callback(asyncio.to_thread, self._engine_loop.stop, _STOP_TIMEOUT_S)
            if self._exchange is not None:
                rest.push_async_callback(self._exchange.disconnect)
            await self._dismiss(reason, is_planned=True)

    def _exchanging_engine(self, facts: RankFacts) -> Engine | None:
        """An engine that exchanges blocks with other groups; None where that cannot be: it can do without."""
        try:
            exchange = LeaderExchange(self._start, facts, self._leader.prepared, self._leader.link)
            engine = self._engine(facts, exchange)
            exchange.load(self._leader.pool, engine.generations, self._host)
        except ExchangeImpossible as error:
            _log.warning("group %s exchanges no KV blocks with others: %s", self._start.group_id, error)
            self._exchange_problem = str(error)
            return None
        self._exchange = exchange
        return engine

    def _engine(self, facts: RankFacts, exchange: LeaderExchange | None) -> Engine:
        config = self._start.config
        return Engine(
            limits=facts.limits,
            cache=config.cache,
            schedule=config.schedule,
            executor=self._leader.executor,
            starter=self._leader.starter,
            speculative=config.speculative,
            exchange=exchange.setup if exchange is not None else None,
            metered=self._metered,
            grammars=self._grammars,
        )

    def _redirect(self, request_id: RequestId, source: KVSource | None) -> None:
        assert self._engine_loop is not None
        self._engine_loop.exchange(Redirect(request_id, source))

    def _info(self, facts: RankFacts) -> GroupInfo:
        model = self._start.config.model
        return GroupInfo(
            group_id=self._start.group_id,
            epoch=self._start.epoch,
            role=self._start.role,
            model=model.name or os.path.basename(os.path.normpath(model.path)),
            model_hash=facts.model_hash,
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            tensor_parallel=facts.tensor_parallel,
            vocab_size=facts.limits.vocab_size,
            max_model_len=facts.limits.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            kv_bytes_per_block=facts.kv_bytes_per_block,
            context_token_s=self._context_token_s(facts),
            exchanges_kv=self._exchange is not None,
            exchange_problem=self._exchange_problem,
        )

    def _context_token_s(self, facts: RankFacts) -> float:
        rate = self._metered.ceilings.read_bytes_per_s if self._metered is not None else 0.0
        return facts.kv_bytes_per_block / facts.block_size / rate if rate else 0.0

    def _on_output(self, output: StepOutput) -> None:
        """From the engine's thread."""
        assert self._server is not None
        self._server.on_output(output)
        if output.failure is not None:
            self._asyncio_loop.call_soon_threadsafe(self._end, output.failure)

    def _on_failure(self, reason: str) -> None:
        """From the watchdog's thread, when a rank is lost: say so, then end the process.

        The engine's thread may be stuck in a collective, so the server says it without the engine.
        """
        asyncio.run_coroutine_threadsafe(self._dismiss(reason), self._asyncio_loop)
        self._end_process(reason)

    async def _dismiss(self, reason: str, *, is_planned: bool = False) -> None:
        self._end(reason)
        if self._server is not None:
            await self._server.stop(reason, is_planned=is_planned)

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)


class FollowerHost:
    """A rank above 0."""

    def __init__(self, start: GroupStart, rank: int, rendezvous: Rendezvous) -> None:
        self._follower = Follower(start.config, rank, rendezvous)
        self._exchange = FollowerExchange(start, rank)

    def load(self) -> None:
        """Meet rank 0 and load. Raises what `Follower.load` raises."""
        self._follower.load(self._exchange.prepare)

    def follow(self) -> None:
        """Compute until rank 0 ends the group. Raises what `Follower.follow` raises."""
        try:
            self._follower.follow()
        finally:
            self._exchange.close()
        self._follower.close()  # in order only: it would wait for ranks that may be dead
