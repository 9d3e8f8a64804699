"""Ranks, here threads, come to add up in symmetric memory, or agree that they cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import pytest
import torch

from tests.unit.kernels.emulated_peers import EmulatedHost, EmulatedMemory, at_once
from tests.unit.runtime.meeting import Meeting
from workers.kernels import SymmetricCollective
from workers.runtime.symmetric_memory import Place, buffer_bytes, settle

NO_RANK = -1


class Refusing(EmulatedMemory):
    def meet(self) -> None:
        raise RuntimeError("CUDA driver error: invalid argument")


class Wrong(EmulatedMemory):
    """Adds one of the ranks twice."""

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        part *= 2
        super().one_shot(part, out)


class Rounding(EmulatedMemory):
    """Gives the next number in place of the sum."""

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        super().one_shot(part, out)
        out.copy_(torch.nextafter(out, torch.full_like(out, torch.inf)))


class ByLength(EmulatedMemory):
    """Another order for what goes in two shots."""

    def two_shots(self, part: torch.Tensor) -> None:
        parts = self._begin("two shots", part)
        total = reduce(torch.add, parts[::-1])
        self._host.wait()
        part.copy_(total)
        self._host.wait()


class Different(EmulatedMemory):
    """Another order on another rank."""

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        parts = self._begin("one shot", part)
        total = reduce(torch.add, parts[self._rank :] + parts[: self._rank])
        self._host.wait()
        out.copy_(total)

    def two_shots(self, part: torch.Tensor) -> None:
        self.one_shot(part, part)


@dataclass
class EmulatedPeers:
    """Implements `workers.runtime.symmetric_memory.Peers`."""

    host: EmulatedHost
    rank: int
    kind: type[EmulatedMemory] = EmulatedMemory
    is_short_of_memory: bool = False
    unseen: int = NO_RANK  # a rank whose GPU this one does not see
    problem: str = ""
    taken: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"GPU-{self.rank}"

    def reachable(self) -> list[str]:
        if self.problem:
            raise RuntimeError(self.problem)
        return [f"GPU-{other}" for other in range(self.host.size) if other not in (self.rank, self.unseen)]

    def allocate(self, num_bytes: int) -> EmulatedMemory:
        if self.is_short_of_memory:
            raise RuntimeError("CUDA driver error: out of memory")
        self.taken.append(num_bytes)
        return self.kind(self.host, self.rank, num_bytes)


def meet(
    size: int,
    change: Callable[[EmulatedPeers], None] = lambda peers: None,
    objections: dict[int, str] | None = None,
    message_bytes: int = 64,
) -> tuple[list[SymmetricCollective | None], list[EmulatedPeers]]:
    """change: what is other than usual with the GPUs of a rank."""
    meeting, host = Meeting(size), EmulatedHost(size)
    peers = [EmulatedPeers(host, rank) for rank in range(size)]
    sums = EmulatedHost(size)  # of NCCL
    for each in peers:
        change(each)

    def nccl(rank: int, x: torch.Tensor) -> None:
        sums.buffers[rank] = x.clone()
        sums.wait()
        x.copy_(reduce(torch.add, [sums.buffers[other] for other in range(size)]))
        sums.wait()

    def run(rank: int) -> SymmetricCollective | None:
        place = Place(
            rank=rank, size=size, message_bytes=message_bytes, objection=(objections or {}).get(rank, "")
        )
        if rank == 0:
            return settle(place, peers[0], meeting.decide, lambda x: nccl(0, x))
        return settle(place, peers[rank], lambda own, _: meeting.tell(rank, own), lambda x: nccl(rank, x))

    return list(at_once(size, run)), peers


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_of_one_machine_share_memory(size: int, caplog: pytest.LogCaptureFixture) -> None:
    found, peers = meet(size)

    def add(rank: int) -> list[float]:
        collective, x = found[rank], torch.tensor([10.0**rank, 1.0])
        assert collective is not None
        collective.all_reduce(x)
        return x.tolist()

    assert at_once(size, add) == [[sum(10.0**rank for rank in range(size)), size]] * size
    assert caplog.records == []
    assert [each.taken for each in peers] == [[8 << 20]] * size


def why_not(
    size: int,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[EmulatedPeers], None] = lambda peers: None,
    objections: dict[int, str] | None = None,
) -> str:
    """Of a group that uses NCCL: the reason, said once."""
    found, _ = meet(size, change, objections)
    assert found == [None] * size
    (message,) = caplog.messages
    start = "the ranks add up by NCCL, not in symmetric memory: "
    assert message.startswith(start)
    return message.removeprefix(start)


@pytest.mark.parametrize("rank", [0, 1, 2])
class TestOneRankThatCannot:
    """And none does, wherever it is."""

    def test_forbids(self, rank: int, caplog: pytest.LogCaptureFixture) -> None:
        why = why_not(3, caplog, objections={rank: "the ranks are on several machines"})
        assert why == f"rank {rank}: the ranks are on several machines"

    def test_lacks_it(self, rank: int, caplog: pytest.LogCaptureFixture) -> None:
        def change(peers: EmulatedPeers) -> None:
            peers.problem = "torch 2.0 lacks the operators" if peers.rank == rank else ""

        assert why_not(3, caplog, change) == f"rank {rank}: torch 2.0 lacks the operators"

    def test_does_not_see_the_others(self, rank: int, caplog: pytest.LogCaptureFixture) -> None:
        other = (rank + 1) % 3

        def change(peers: EmulatedPeers) -> None:
            peers.unseen = other if peers.rank == rank else NO_RANK

        wanted = f"rank {rank} does not see the GPU of rank {other}, or has no NVLink to it"
        assert why_not(3, caplog, change) == wanted

    def test_has_no_memory(self, rank: int, caplog: pytest.LogCaptureFixture) -> None:
        def change(peers: EmulatedPeers) -> None:
            peers.is_short_of_memory = peers.rank == rank

        assert why_not(3, caplog, change) == f"rank {rank}: CUDA driver error: out of memory"


def test_ranks_that_do_not_meet(caplog: pytest.LogCaptureFixture) -> None:
    def change(peers: EmulatedPeers) -> None:
        peers.kind = Refusing

    assert why_not(2, caplog, change) == "rank 0: CUDA driver error: invalid argument"


@pytest.mark.parametrize(
    ("size", "kind", "why"),
    [
        (2, Wrong, "rank 0: a first sum of torch.bfloat16 is wrong"),
        (3, Wrong, "rank 0: a first sum of torch.bfloat16 is wrong"),
        (2, Rounding, "rank 0: NCCL finds another sum of torch.bfloat16 of two ranks"),
        (
            3,
            ByLength,
            "rank 0: a sum of torch.bfloat16 depends on the length of the message or the place in it",
        ),
        (3, Different, "the ranks found different first sums"),
    ],
)
def test_first_sums_that_are_not_as_they_must_be(
    size: int, kind: type[EmulatedMemory], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change(peers: EmulatedPeers) -> None:
        peers.kind = kind

    assert why_not(size, caplog, change) == why


def test_room_for_the_decode_rows_of_a_step() -> None:
    assert [buffer_bytes(n) for n in (0, 8 << 20, (8 << 20) + 1)] == [8 << 20, 8 << 20, 10 << 20]
    _, peers = meet(2, message_bytes=9 << 20)
    assert peers[0].taken == [10 << 20]
