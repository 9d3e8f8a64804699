"""Ranks, here threads, come to share memory or agree that they cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.runtime.meeting import PATIENCE_S, WRONG_PLACES, Meeting
from workers.kernels import KernelsUnavailable, Library, SharedCollective, load_library
from workers.runtime.handshake import Facts
from workers.runtime.shared_memory import Place, follow, lead

Found = SharedCollective | None


def no_compiler() -> Library:
    raise KernelsUnavailable("no C++ compiler found")


def meet(
    size: int,
    *,
    num_here: int | None = None,
    without_compiler: int | None = None,
    change: Callable[[Facts], Facts] = lambda facts: facts,
) -> list[Found]:
    """change: what happens to agreed facts on their way."""
    meeting = Meeting(size, change)
    here = size if num_here is None else num_here

    def run(rank: int) -> Found:
        place = Place(rank=rank, size=size, timeout_s=PATIENCE_S)
        load = no_compiler if rank == without_compiler else load_library
        if rank == 0:
            return lead(place, here, meeting.decide, load)
        return follow(place, here, lambda own: meeting.tell(rank, own), load)

    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    # A mapping keeps a descriptor of its own; nothing else stays.
    assert len(os.listdir("/proc/self/fd")) == before + size - found.count(None)
    return found


def test_ranks_of_one_machine_share_memory(caplog: pytest.LogCaptureFixture) -> None:
    collectives = meet(3)

    def add(rank: int) -> list[float]:
        collective, x = collectives[rank], torch.tensor([10.0**rank, 1.0])
        assert collective is not None
        collective.all_reduce(x)
        return x.tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add, range(3))) == [[111.0, 3.0]] * 3
    assert caplog.records == []


def test_ranks_of_several_machines_do_not(caplog: pytest.LogCaptureFixture) -> None:
    assert meet(3, num_here=2) == [None] * 3
    assert caplog.messages == ["the ranks are on several machines: they add up over the network"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_without_a_compiler_and_none_shares(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    assert meet(3, without_compiler=rank) == [None] * 3
    assert caplog.messages == [
        f"the ranks add up over loopback sockets, not in shared memory: rank {rank}: no C++ compiler found"
    ]


@pytest.mark.parametrize(("what", "wrong", "why"), WRONG_PLACES)
def test_memory_that_is_not_of_rank_0_is_not_used(
    what: str, wrong: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change(facts: Facts) -> Facts:
        return {**facts, what: wrong} if "path" in facts else facts

    assert meet(2, change=change) == [None] * 2
    (message,) = caplog.messages
    assert message.startswith("the ranks add up over loopback sockets, not in shared memory: rank 1: ")
    assert why in message


def test_memory_of_another_size_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    fd = os.memfd_create("small")
    os.truncate(fd, 4096)
    try:
        found = meet(2, change=lambda facts: {**facts, "path": f"/proc/{os.getpid()}/fd/{fd}"})
    finally:
        os.close(fd)
    assert found == [None] * 2
    assert "rank 1: the memory of rank 0 has 4096 bytes, expected are " in caplog.messages[0]
