"""The rank actors of one group, as its front sees them: start, load, watch, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.group_start import GroupStart, LoadedGroup, RankPlace
from workers.ranks.actor import RankActor

_END_GRACE_S = 2.0  # a rank that was told to go, or lost its group, needs no longer
_STOP_TIMEOUT_S = 15.0
_CAUSE_WAIT_S = 5.0  # a rank that lost another one in the middle of a load has said so by then
_log = logging.getLogger("ray.serve")


class RankLost(RuntimeError):
    """A rank could not start or is gone; the message names it and says why."""


class RankSet:
    """Actors of ranks 0 .. tensor_parallel - 1, each in a bundle of the replica's placement group.

    Ranks that follow each other are on the same machine as far as that goes: rings of collectives then cross
    from one machine to the next once. Ray places bundles in no such order, whatever the strategy.
    """

    def __init__(self, start: GroupStart) -> None:
        self._start = start
        self._actors: list[Any] = []  # handles
        self._places: tuple[RankPlace, ...] = ()
        self._runs: list[asyncio.Task[str]] = []

    async def start(self) -> Sequence[RankPlace]:
        """Start the processes. Returns when all of them answer."""
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment has placement_group_bundles"
        table = await asyncio.to_thread(placement_group_table, group)
        nodes: dict[int, str] = table["bundles_to_node_id"]
        for index in side_by_side([nodes[place] for place in range(group.bundle_count)]):
            bundle = group.bundle_specs[index]
            resources = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
            options = ray.remote(RankActor).options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
                ),
            )
            self._actors.append(options.remote(self._start, len(self._actors)))
        self._places = tuple(await all_ranks([actor.place.remote() for actor in self._actors]))
        gpus = gpus_to_share(self._places) if self._start.config.parallel.symmetric_memory else ()
        if gpus:
            await all_ranks([actor.see.remote(gpus) for actor in self._actors])
        return self._places

    async def load(self) -> LoadedGroup:
        """Let all ranks load at once. Raises RankLost with the words of the rank that cannot."""
        rendezvous = self._actors[0].open.remote()  # passed on as it is: the front need not know what it says
        loaded = await all_ranks([actor.load.remote(rendezvous) for actor in self._actors])
        self._runs = [asyncio.create_task(self._run(rank)) for rank in range(len(self._actors))]
        return cast(LoadedGroup, loaded[0])

    async def first_end(self) -> str:
        """Return when a rank is over, with the reason."""
        done, _ = await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()

    async def drain(self, timeout_s: float) -> int:
        """Let requests finish; returns how many are left after the time, 0 when rank 0 cannot say."""
        if not self._actors:
            return 0
        try:
            async with asyncio.timeout(timeout_s + 5.0):
                return cast(int, await self._actors[0].drain.remote(timeout_s))
        except (RayError, TimeoutError) as error:
            _log.warning("rank 0 does not say how many requests are left: %r", error)
            return 0

    async def stop(self, reason: str) -> None:
        """End the group in order: rank 0 ends its requests and tells the others."""
        if self._actors:
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._actors[0].stop.remote(reason)
            except (RayError, TimeoutError) as error:
                _log.warning("rank 0 does not end in order and is killed: %r", error)
        await self.end()

    async def end(self) -> None:
        """End what is left, the last rank first; nothing of the group is alive afterwards."""
        if self._runs:
            await asyncio.wait(self._runs, timeout=_END_GRACE_S)  # failing ranks say why, then end themselves
        for actor in reversed(self._actors):
            ray.kill(actor)
        for run in self._runs:
            run.cancel()
        await self._kill_stuck()
        self._actors, self._runs = [], []

    async def _kill_stuck(self) -> None:
        """A stopped or stuck process does not obey Ray: kill it by its id, where it is on this machine."""
        here = ray.get_runtime_context().get_node_id()
        pids = [place.pid for place in self._places if place.node_id == here]
        deadline = asyncio.get_running_loop().time() + _END_GRACE_S
        while pids and asyncio.get_running_loop().time() < deadline:
            pids = [pid for pid in pids if _is_rank_process(pid)]
            await asyncio.sleep(0.1)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _run(self, rank: int) -> str:
        try:
            reason = await self._actors[rank].run.remote()
        except RayActorError as error:
            return f"the process of rank {rank} is gone: {_first_line(error)}"
        except RayError as error:
            return f"rank {rank} ended: {_cause(error)}"
        return str(reason) or f"rank {rank} ended"


def side_by_side(nodes: Sequence[str]) -> list[int]:
    """The bundles in the order of their ranks, from the machine of each: those of a machine one behind the
    other, that of bundle 0, where the front is, first."""
    return sorted(range(len(nodes)), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))


def gpus_to_share(places: Sequence[RankPlace]) -> tuple[str, ...]:
    """The GPUs of all ranks, in their order, for each of them to see: Ray shows a process its own alone, and
    to add up in memory of each other ranks have to see both. Empty where that cannot be: on several machines,
    where ranks have no GPU, several or the same, and for parts of one (MIG), of which CUDA sees the first.
    """
    gpus = tuple(gpu for place in places for gpu in place.gpus)
    can_share = (
        len({place.node_id for place in places}) == 1
        and all(len(place.gpus) == 1 for place in places)
        and len(set(gpus)) == len(gpus) > 1
        and not any(gpu.startswith("MIG") for gpu in gpus)
    )
    return gpus if can_share else ()


async def all_ranks(calls: Sequence[Awaitable[Any]], *, cause_wait_s: float = _CAUSE_WAIT_S) -> list[Any]:
    """Results of one call a rank. Raises RankLost at the first error, in the words of a rank that is alive
    when one speaks within `cause_wait_s`: the others fail because of what it has seen."""
    tasks = [asyncio.create_task(_answer(rank, call)) for rank, call in enumerate(calls)]
    try:
        return list(await asyncio.gather(*tasks))
    except RankLost as error:
        await asyncio.wait(tasks, timeout=cause_wait_s)
        faults = [task.exception() for task in tasks if task.done()]
        cause = next((fault for fault in faults if isinstance(fault, _RankFault)), error)
        if cause is error:
            raise
        raise cause from error
    finally:
        for task in tasks:
            task.cancel()


class _RankFault(RankLost):
    """A rank that is alive and says what is wrong."""


async def _answer(rank: int, call: Awaitable[Any]) -> Any:
    try:
        return await call
    except RayActorError as error:
        raise RankLost(f"the process of rank {rank} is gone: {_first_line(error)}") from error
    except RayError as error:
        raise _RankFault(f"rank {rank}: {_cause(error)}") from error


def _cause(error: RayError) -> str:
    """What was raised in the actor, without Ray's wrapping."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    return f"{type(cause).__name__}: {cause}" if cause is not error else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _is_rank_process(pid: int) -> bool:
    """Whether the process lives and is still a Ray actor (ids are used again)."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline, open(f"/proc/{pid}/stat") as stat:
            is_zombie = stat.read().rpartition(")")[2].split()[0] == "Z"
            return cmdline.read().startswith(b"ray::") and not is_zombie
    except OSError:
        return False
