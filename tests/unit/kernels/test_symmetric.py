"""Sums in memory that all ranks see: the same bits, however long a message is and which way it goes."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from tests.unit.kernels.emulated_peers import EmulatedHost, EmulatedMemory, at_once
from workers.kernels import SymmetricCollective
from workers.model.parallel import TensorParallel

BUFFER_BYTES = 1 << 20
DTYPES = [torch.bfloat16, torch.float32]


class Ranks:
    """Of one host, that have met."""

    def __init__(self, size: int) -> None:
        self.host = EmulatedHost(size)
        self.memories = [EmulatedMemory(self.host, rank, BUFFER_BYTES) for rank in range(size)]
        at_once(size, lambda rank: self.memories[rank].meet())
        self.collectives = [SymmetricCollective(memory, size) for memory in self.memories]

    def add_up(self, messages: list[torch.Tensor]) -> list[tuple[object, ...]]:
        """In place; the calls that it took."""
        before = len(self.host.calls[0])
        at_once(self.host.size, lambda rank: self.collectives[rank].all_reduce(messages[rank]))
        return self.host.calls[0][before:]


def messages_of(size: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("length", [1, 7, 64, 1003])
def test_short_messages_are_added_in_the_order_of_the_ranks(
    size: int, length: int, dtype: torch.dtype
) -> None:
    ranks, messages = Ranks(size), messages_of(size, length, dtype)
    wanted = reduce(torch.add, messages)
    unit = 16 // dtype.itemsize
    assert ranks.add_up(messages) == [("one shot", dtype, -(-length // unit) * unit)]
    assert all(torch.equal(message, wanted) for message in messages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("num_bytes", [600 << 10, BUFFER_BYTES, 2 * BUFFER_BYTES + 4])
def test_long_messages_have_the_bits_of_short_ones(size: int, num_bytes: int, dtype: torch.dtype) -> None:
    """In any place of them."""
    ranks, period = Ranks(size), 1003
    shorts = messages_of(size, period, dtype)
    count = num_bytes // dtype.itemsize
    longs = [short.repeat(count // period + 1)[:count].clone() for short in shorts]
    calls = ranks.add_up(longs)
    ranks.add_up(shorts)
    assert {kind for kind, *_ in calls[: max(1, len(calls) - 1)]} == {"two shots"}
    assert len(calls) == -(-num_bytes // BUFFER_BYTES)
    for long in longs:
        whole = long[: count // period * period].view(-1, period)
        assert torch.equal(whole, shorts[0].expand_as(whole))
        assert torch.equal(long[len(whole.view(-1)) :], shorts[0][: count % period])


def test_a_message_that_begins_anywhere() -> None:
    """Where it lies may differ from rank to rank: the kernels must not."""
    ranks = Ranks(2)
    whole = messages_of(2, 72, torch.bfloat16)
    messages = [whole[0][:64], whole[1][3:67]]
    wanted = messages[0] + messages[1]
    behind = whole[0][64:].clone()
    assert ranks.add_up(messages) == [("one shot", torch.bfloat16, 64)]
    assert torch.equal(messages[0], wanted) and torch.equal(messages[1], wanted)
    assert torch.equal(whole[0][64:], behind)


def test_nothing_is_added_up_without_numbers() -> None:
    assert Ranks(2).add_up([torch.zeros(0, 8), torch.zeros(0, 8)]) == []


def test_what_comes_here() -> None:
    """Of two ranks, whose sums have one order anyway, what the buffer holds; of more, whatever the length."""
    pair, more = Ranks(2).collectives[0], Ranks(3).collectives[0]
    short, long = torch.zeros(BUFFER_BYTES // 4), torch.zeros(BUFFER_BYTES // 4 + 1)
    assert [pair.is_for(short), pair.is_for(long)] == [True, False]
    assert [more.is_for(short), more.is_for(long)] == [True, True]
    assert not more.is_for(short.double()) and not pair.is_for(short.long())


def test_a_model_adds_up_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, by_nccl = Ranks(2), []
    monkeypatch.setattr(torch.distributed, "all_reduce", by_nccl.append)
    groups = [TensorParallel(rank=rank, size=2, symmetric=ranks.collectives[rank]) for rank in range(2)]
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])]
    found = at_once(2, lambda rank: groups[rank].add_up(parts[rank], parts[rank].clone()))
    assert [each.tolist() for each in found] == [[[22.0, 44.0]]] * 2
    assert by_nccl == []
    long = torch.zeros(BUFFER_BYTES // 4 + 1)
    groups[0].all_reduce(long)
    assert by_nccl == [long]
    ranks.collectives[1].abort()
    assert [memory.is_released for memory in ranks.memories] == [False, True]
