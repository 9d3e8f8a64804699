"""How the benchmark of loading ends its ranks."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from benchmarks import loading


@dataclass
class FakeRank:
    """A process that notes what is done with it; one that hangs does not end when it is killed."""

    name: str
    done: list[str]
    hangs: bool = field(default=False)

    def kill(self) -> None:
        self.done.append(f"kill {self.name}")

    def wait(self, timeout: float) -> int:
        self.done.append(f"wait {self.name}")
        if self.hangs:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return -9


def test_a_rank_that_does_not_end_leaves_none_of_the_others_running() -> None:
    done: list[str] = []
    ranks = [FakeRank("0", done, hangs=True), FakeRank("1", done)]
    with pytest.raises(subprocess.TimeoutExpired, match=r"'0' timed out after 30\.0 seconds"):
        vars(loading)["_end"](cast("list[Any]", ranks))
    assert done == ["kill 0", "kill 1", "wait 0", "wait 1"]
