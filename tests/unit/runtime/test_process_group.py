"""What is asked of NCCL, without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from workers.engine.step import GroupFailed
from workers.ports import open_store
from workers.runtime.process_group import WARM_UP_TIMEOUT_S, ProcessGroup

CPU = torch.device("cpu")


def group_of(monkeypatch: pytest.MonkeyPatch, total: float) -> list[tuple[str, Any]]:
    """Rank 1 of 3 of a double whose first sum is `total`: what was called."""
    calls: list[tuple[str, Any]] = []

    def all_reduce(x: torch.Tensor) -> None:
        calls.append(("all-reduce", x.tolist()))
        x.fill_(total)

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **asked: calls.append((kind, asked)))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    store = open_store("127.0.0.1", timeout_s=5)
    ProcessGroup(store, host="127.0.0.1", rank=1, size=3, device=CPU, backend="nccl", timeout_s=10.0)
    return calls


def test_a_communicator_is_there_when_the_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its memory is taken before anybody measures what is free."""
    (kind, asked), *more = group_of(monkeypatch, 3.0)
    assert kind == "nccl" and asked["device_id"] == CPU
    assert more == [("all-reduce", [1.0])]


def test_its_own_limit_is_behind_those_of_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = group_of(monkeypatch, 3.0)[0][1]
    assert asked["timeout"].total_seconds() > max(10.0, WARM_UP_TIMEOUT_S)


def test_a_wrong_first_sum_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GroupFailed, match="rank 1: the first all-reduce gave 4"):
        group_of(monkeypatch, 4.0)
