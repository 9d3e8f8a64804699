"""What a rank process has of KV transfer: it serves its pool to others and pulls their blocks into it.

    agent = Agent(pool=..., layout=..., rank=..., generations=..., host=..., settings=...)
    agent.endpoint                     # tell it to those who may read
    agent.pull(source, order)          # the order's callback comes from a thread of the agent
    agent.close()                      # from then on the pool is not written, and no read of it is valid

Threads: one serves all readers; one for each source that is being read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from workers.kernels import Library, load_library
from workers.ports import open_port
from workers.transfer.choice import TRANSPORTS
from workers.transfer.cross_memory import MEMORY, Proof, allow_readers
from workers.transfer.layout import KVLayout
from workers.transfer.link import Endpoint
from workers.transfer.messages import MemoryFacts, PeerFacts
from workers.transfer.pool_bytes import PoolBytes, find_library
from workers.transfer.puller import Order, Puller, Route, SourceGroup, TransferSettings
from workers.transfer.server import BlockServer
from workers.transfer.source import Source
from workers.transfer.transport import Reason, TransferFailed

# The next order for another source ends the thread and connections of one that nobody has asked for so long.
_IDLE_S: Final = 60.0


class Agent:
    """Of one rank. `pull` and `close` may be called from any thread but its own."""

    def __init__(
        self,
        *,
        pool: torch.Tensor,
        layout: KVLayout,
        rank: int,
        generations: NDArray[np.int64] | None,
        host: str,
        settings: TransferSettings,
        load: Callable[[], Library] = load_library,
    ) -> None:
        """Listens on a free port of `host` and begins to serve.

        pool: (num_blocks, block_bytes) uint8, contiguous. generations: of rank 0, as
        `transport` says; None for the others. load: raises KernelsUnavailable where sockets have to do
        without C++. Raises ValueError when these do not fit each other.
        """
        self._pool = PoolBytes(pool, find_library(load) if pool.device.type == "cpu" else None)
        if self._pool.block_bytes != layout.block_bytes(rank):
            raise ValueError(
                f"a block of the pool has {self._pool.block_bytes} bytes, by the layout it should have "
                f"{layout.block_bytes(rank)}"
            )
        if (generations is None) == (rank == 0):
            raise ValueError(f"rank {rank}: rank 0 keeps the generations, and only rank 0")
        unknown = set(settings.transports) - set(TRANSPORTS)
        if unknown or not settings.transports:
            raise ValueError(f"transports {settings.transports}: choose from {', '.join(TRANSPORTS)}")
        self._layout = layout
        self._rank = rank
        self._settings = settings
        self._proof = Proof()  # must live as long as the facts are told
        self._lock = Lock()
        self._pullers: dict[SourceGroup, tuple[Puller, float]] = {}  # with the time of the last order
        self._is_closing = False
        source = Source(self._pool, generations)
        facts = PeerFacts(
            rank=rank,
            layout=layout,
            num_blocks=self._pool.num_blocks,
            device=pool.device.type,
            has_generations=generations is not None,
            transports=settings.transports,
            memory=self._memory_facts(generations),
        )
        listener = open_port(host)
        self._endpoint = Endpoint(host, listener.getsockname()[1])
        self._server = BlockServer(listener, source, facts, settings.secret)

    @property
    def endpoint(self) -> Endpoint:
        """Where this agent listens."""
        return self._endpoint

    def routes(self) -> list[Route]:
        """How blocks come here now, with the reason of each choice."""
        with self._lock:
            return [route for puller, _ in self._pullers.values() for route in puller.routes()]

    def transports(self, source: SourceGroup) -> tuple[str, ...]:
        """By which the blocks of its ranks come here now, each once; none without a connection."""
        with self._lock:
            known = self._pullers.get(source)
        return tuple(sorted({route.transport for route in known[0].routes()})) if known is not None else ()

    def pull(self, source: SourceGroup, order: Order) -> None:
        """Returns at once. Raises TransferFailed when the order is not taken: then no callback comes. So it
        is with a source of another layout.

        The blocks that are written belong to the order until its callback. Raises ValueError for blocks
        outside the own pool.
        """
        bad = [block.own for block in order.blocks if not 0 <= block.own < self._pool.num_blocks]
        if bad or not order.blocks:
            raise ValueError(f"pull of {len(order.blocks)} blocks; outside the own pool: {bad[:5]}")
        for idle in self._take_idle(source):
            idle.cancel()  # its thread ends by itself: without orders it writes nothing
        with self._lock:
            if self._is_closing:
                raise TransferFailed(Reason.CANCELLED, "this rank ends")
            known = self._pullers.get(source)
            puller = known[0] if known is not None else self._new_puller(source)
            self._pullers[source] = (puller, time.monotonic())
            puller.add(order)

    def close(self) -> None:
        """Ends everything, in seconds. Orders that wait or run end by their callback. May be called twice."""
        with self._lock:
            self._is_closing = True
            pullers = [puller for puller, _ in self._pullers.values()]
            self._pullers = {}
        for puller in pullers:
            puller.cancel()
        with ExitStack() as rest:  # all of it, also when one part fails
            rest.callback(self._server.close)
            rest.callback(self._proof.revoke)
            for puller in pullers:
                rest.callback(puller.close)

    def _new_puller(self, source: SourceGroup) -> Puller:
        return Puller(source, self._layout, self._rank, self._pool, self._settings)

    def _take_idle(self, needed: SourceGroup) -> list[Puller]:
        """Those that are not needed any more."""
        before_s = time.monotonic() - _IDLE_S
        with self._lock:
            idle = [
                source
                for source, (puller, used_s) in self._pullers.items()
                if source != needed and used_s < before_s and puller.is_idle
            ]
            return [self._pullers.pop(source)[0] for source in idle]

    def _memory_facts(self, generations: NDArray[np.int64] | None) -> MemoryFacts | None:
        if not self._pool.is_host_memory or MEMORY not in self._settings.transports:
            return None
        allow_readers()
        return MemoryFacts(
            machine=self._settings.machine,
            pid=os.getpid(),
            pool_address=self._pool.address,
            generations_address=generations.ctypes.data if generations is not None else 0,
            proof_address=self._proof.address,
            proof=self._proof.value,
        )
