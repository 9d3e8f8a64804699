"""A group on a machine without a cluster: this process is rank 0, followers are its child processes.

    with LocalGroup(config) as group:
        Engine(executor=group.executor, ...)

A follower is `python -m workers rank`. It gets its config as JSON on stdin, the token never shows in a
process list. It ends by itself when rank 0 is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import workers
from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig
from workers.engine.step import Executor
from workers.runtime.handshake import Rendezvous
from workers.runtime.rank import Follower, Leader, RankFacts, exit_process

_STOP_TIMEOUT_S = 5.0
_Leaf = TypeVar("_Leaf", ModelConfig, CacheConfig, ScheduleConfig, ParallelConfig, Rendezvous)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What a follower process needs to know."""

    config: GroupConfig
    rank: int
    rendezvous: Rendezvous

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RankOrder:
        """Raises ValueError for anything but what `to_json` writes."""
        values = _object(json.loads(text), "order")
        config = _object(values.get("config"), "config")
        rank = values.get("rank")
        if type(rank) is not int:
            raise ValueError(f"rank {rank!r} is not a number")
        return RankOrder(
            config=GroupConfig(
                model=_leaf(ModelConfig, config.get("model")),
                cache=_leaf(CacheConfig, config.get("cache")),
                schedule=_leaf(ScheduleConfig, config.get("schedule")),
                parallel=_leaf(ParallelConfig, config.get("parallel")),
            ),
            rank=rank,
            rendezvous=_leaf(Rendezvous, values.get("rendezvous")),
        )


class LocalGroup:
    """All ranks of a group on this machine. Followers end in the reverse order of their start."""

    def __init__(self, config: GroupConfig, *, on_failure: Callable[[str], None] = exit_process) -> None:
        """Starts the followers and loads. Raises as `Leader.load`; then nothing is left running."""
        self._leader = Leader(config, on_failure=on_failure)
        self.followers: list[subprocess.Popen[str]] = []
        try:
            for rank in range(1, config.parallel.tensor_parallel):
                order = RankOrder(config=config, rank=rank, rendezvous=self._leader.rendezvous)
                self.followers.append(_start_follower(order))
            self.facts: RankFacts = self._leader.load()
        except BaseException:
            self.close()
            raise

    @property
    def executor(self) -> Executor:
        return self._leader.executor

    def close(self) -> None:
        """Asks the followers to end; kills those that do not. May be called twice."""
        self._leader.close()
        for process in reversed(self.followers):
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_follower(order_json: str) -> int:
    """Body of a follower process: from its order to the end of its group. Returns the exit code."""
    order = RankOrder.from_json(order_json)
    follower = Follower(order.config, order.rank, order.rendezvous)
    try:
        follower.load()
        follower.follow()
    except Exception as error:
        # Leaving the process group in order would wait for ranks that may be dead.
        exit_process(f"rank {order.rank}: {type(error).__name__}: {error}")
    follower.close()
    return 0


def _start_follower(order: RankOrder) -> subprocess.Popen[str]:
    # The child must find this package also when it is not installed and the working folder is another one.
    root = str(Path(workers.__file__).parent.parent)
    path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH", "")) if entry)
    process = subprocess.Popen(
        [sys.executable, "-m", "workers", "rank"],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(order.to_json())
    return process


def _object(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _leaf(kind: type[_Leaf], value: object) -> _Leaf:
    values = _object(value, kind.__name__)
    known = {field.name for field in fields(kind)}
    if set(values) != known:
        raise ValueError(f"{kind.__name__} has fields {sorted(values)}, expected {sorted(known)}")
    return kind(**values)  # type: ignore[arg-type]  # fields checked by name above; the writer is our own to_json
