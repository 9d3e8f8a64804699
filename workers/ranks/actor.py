"""A rank of a group as a Ray actor. The front makes it inside its placement group and never imports torch.

Life cycle, driven by the front: `place` (torch begins to load) -> `see`, where ranks may see each other's
GPUs -> `open` (rank 0 says where the ranks meet) -> `load` on all ranks at once -> `run` (until the rank is
over) -> on rank 0 `drain`, `stop`.
The process belongs to the rank: when its group breaks, it ends itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import ray

from workers.group_start import GroupStart, LoadedGroup, RankPlace

if TYPE_CHECKING:
    from workers.ranks.host import FollowerHost, LeaderHost
    from workers.runtime.handshake import Rendezvous


class RankActor:
    """One rank. Methods that rank 0 alone has say so."""

    def __init__(self, start: GroupStart, rank: int) -> None:
        self._start = start
        self._rank = rank
        self._host_address = "127.0.0.1" if start.on_loopback else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._host_module: asyncio.Task[ModuleType] | None = None  # workers.ranks.host, while torch loads
        self._leader: LeaderHost | None = None
        self._follower: FollowerHost | None = None
        self._following: asyncio.Task[None] | None = None

    async def place(self) -> RankPlace:
        """Where this process is. The first call: torch begins to load, on all ranks at once."""
        # Loading torch takes seconds, and only rank processes may do it: here, not at the top of a module
        # that the front imports, and in a thread, so that the process answers meanwhile.
        self._host_module = asyncio.create_task(asyncio.to_thread(_import_rank_host))
        return RankPlace(
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
        )

    async def see(self, gpus: Sequence[str]) -> None:
        """See these GPUs, of which that at the number of this rank is its own, instead of that one alone.
        CUDA reads it when first asked for a device: loading torch does not ask, `open` and `load` do."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    async def open(self) -> Rendezvous | None:
        """Rank 0: open the ports where the ranks meet; None for a group of one."""
        assert self._host_module is not None, "place() first"
        host_module = await self._host_module
        self._leader = host_module.LeaderHost(self._start, host=self._host_address)
        return self._leader.rendezvous

    async def load(self, rendezvous: Rendezvous | None) -> LoadedGroup | None:
        """Bring the rank to where it serves; on rank 0 the answer says what the group is."""
        if self._rank == 0:
            assert self._leader is not None, "open() first"
            info = await asyncio.to_thread(self._leader.load)
            return LoadedGroup(info=info, address=await self._leader.listen())
        assert rendezvous is not None and self._host_module is not None, "place() first"
        host_module = await self._host_module
        self._follower = host_module.FollowerHost(self._start, self._rank, rendezvous)
        await asyncio.to_thread(self._follower.load)
        # Rank 0 ends its load with a step of all ranks, so following begins at once.
        self._following = asyncio.create_task(asyncio.to_thread(self._follower.follow))
        return None

    async def run(self) -> str:
        """Return when this rank is over, with the reason; empty for an orderly end."""
        if self._leader is not None:
            return await self._leader.ended()
        assert self._following is not None, "load() first"
        await self._following
        return ""

    async def drain(self, timeout_s: float) -> int:
        """Rank 0: wait for requests to end; returns how many are left after the time."""
        return await self._leader.drain(timeout_s) if self._leader is not None else 0

    async def stop(self, reason: str) -> None:
        """Rank 0: end the group in order; the other ranks follow."""
        if self._leader is not None:
            await self._leader.stop(reason)


def _import_rank_host() -> ModuleType:
    # Read by libgomp when torch loads it. Its default spins for milliseconds at every barrier and takes the
    # core from the thread that is waited for: on a busy machine five times fewer tokens.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from workers.ranks import host

    return host
