"""A group on a machine without a cluster: this process is rank 0, followers are its child processes.

    with LocalGroup(config) as group:
        Engine(executor=group.executor, ...)

A follower is `python -m workers.runtime.follower`; it ends by itself when rank 0 is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import workers
from workers.config import GroupConfig
from workers.engine.step import Executor, StepStarter
from workers.runtime.order import RankOrder
from workers.runtime.rank import Leader, RankFacts, exit_process

_STOP_TIMEOUT_S = 5.0
_FAILED_STOP_TIMEOUT_S = 1.0  # one that hangs does not end by itself


class LocalGroup:
    """All ranks of a group on this machine. Followers end in the reverse order of their start."""

    def __init__(self, config: GroupConfig, *, on_failure: Callable[[str], None] = exit_process) -> None:
        """Starts the followers and loads. Raises as `Leader.load`; then nothing is left running."""
        self._leader = Leader(config, on_failure=on_failure)
        self.followers: list[subprocess.Popen[str]] = []
        try:
            for rank in range(1, config.parallel.tensor_parallel):
                order = RankOrder(config=config, rank=rank, rendezvous=self._leader.rendezvous)
                self.followers.append(start_follower(order))
            self.facts: RankFacts = self._leader.load(self._is_lost)
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str | None:
        """Why the group ended by itself; None while it lives."""
        return self._leader.failure

    @property
    def is_symmetric(self) -> bool:
        """As `Leader.is_symmetric`."""
        return self._leader.is_symmetric

    @property
    def executor(self) -> Executor:
        return self._leader.executor

    @property
    def starter(self) -> StepStarter | None:
        """As `Leader.starter`."""
        return self._leader.starter

    def close(self) -> None:
        """Asks the followers to end; kills those that do not. May be called twice."""
        self._leader.close()
        patience_s = _STOP_TIMEOUT_S if self._leader.failure is None else _FAILED_STOP_TIMEOUT_S
        for process in reversed(self.followers):
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)

    def _is_lost(self, rank: int) -> str | None:
        process = self.followers[rank - 1]
        if (code := process.poll()) is None:
            return None
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return f"rank {rank} (pid {process.pid}) ended {how} before it joined its group"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_follower(order: RankOrder) -> subprocess.Popen[str]:
    """A follower as a child process of this one."""
    # The child must find this package also when it is not installed and the working folder is another one.
    root = str(Path(workers.__file__).parent.parent)
    path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH", "")) if entry)
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.runtime.follower"],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(order.to_json())
    return process
