from __future__ import annotations

import threading
import time
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import workers.transfer.agent as agent_module
import workers.transfer.puller as puller_module
from tests.unit.transfer.layouts import layout
from tests.unit.transfer.ranks import (
    Load,
    Pull,
    Rank,
    compiled,
    content,
    group,
    no_compiler,
    pairs,
    pull,
    settings,
    source_of,
)
from workers.transfer.agent import Agent
from workers.transfer.choice import TRANSPORTS
from workers.transfer.cross_memory import CrossMemoryReader
from workers.transfer.puller import Order, source_group
from workers.transfer.sockets import SocketReader
from workers.transfer.transport import Reason, TransferFailed
from workers.types import BlockRead

NUM_BLOCKS = 8


def failed(error: TransferFailed | None) -> Reason:
    assert error is not None
    return error.reason


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [(3, (1, 1)), (3, (1, 2)), (3, (2, 1)), (3, (3, 2)), (3, (2, 3)), (2, (4, 2)), (2, (2, 4)), (2, (4, 1))],
)
def test_every_rank_of_any_size_gets_its_heads(transport: str, heads: int, sizes: tuple[int, int]) -> None:
    source, own = (layout(num_kv_heads=heads, tensor_parallel=size, dtype="bfloat16") for size in sizes)
    blocks = content(source, NUM_BLOCKS)
    wanted = [(5, 0), (1, 7), (6, 3)]
    using = settings(transports=(transport,))
    with group(source, using=using) as owners, group(own, using=using) as readers:
        for owner in owners:
            owner.fill(blocks)
        for reader in readers:
            assert pull(reader.agent, source_of(owners), pairs(wanted)) is None
            expected = torch.zeros_like(reader.pool)
            kept = own.heads_of(reader.rank)
            for there, here in wanted:
                expected[here] = blocks[there, kept.start : kept.stop]
            assert torch.equal(reader.pool, expected)
            assert {route.transport for route in reader.agent.routes()} == {transport}


@pytest.mark.parametrize(
    ("transport", "load"), [*((transport, compiled) for transport in TRANSPORTS), ("sockets", no_compiler)]
)
def test_many_blocks_in_one_order(transport: str, load: Load) -> None:
    small = layout(num_kv_heads=1, num_layers=1, block_size=1, head_dim=1)
    num_blocks = 3000
    using = settings(transports=(transport,))
    with (
        group(small, num_blocks=num_blocks, using=using, load=load) as [owner],
        group(small, num_blocks=num_blocks, using=using, load=load) as [reader],
    ):
        blocks = content(small, num_blocks)
        owner.fill(blocks)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        assert pull(reader.agent, source_of([owner]), pairs(list(enumerate(order)))) is None
        assert torch.equal(reader.pool[order], owner.pool)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_block_that_belongs_to_somebody_else_is_not_read(transport: str, size: int) -> None:
    of = layout(tensor_parallel=size)
    using = settings(transports=(transport,))
    with group(of, using=using) as owners, group(of, using=using) as readers:
        generations = owners[0].generations
        assert generations is not None
        generations[:] = 7
        blocks = pairs([(0, 0), (1, 1)], generation=7)
        for reader in readers:
            assert pull(reader.agent, source_of(owners), blocks) is None
        generations[1] += 1
        for reader in readers:
            assert failed(pull(reader.agent, source_of(owners), blocks)) is Reason.STALE
            assert pull(reader.agent, source_of(owners), blocks[:1]) is None


@pytest.mark.parametrize("transport", ["memory", "sockets"])
def test_a_block_given_away_while_a_rank_without_generations_is_read(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = layout(tensor_parallel=2)
    using = settings(transports=(transport,))
    kind = {"memory": CrossMemoryReader, "sockets": SocketReader}[transport]
    read = kind.read
    with group(of, using=using) as owners, group(of, using=using) as readers:
        generations = owners[0].generations
        assert generations is not None

        def read_and_give_away(reader: Any, blocks: Any, pieces: Any) -> None:
            read(reader, blocks, pieces)
            generations[1] += 1

        monkeypatch.setattr(kind, "read", read_and_give_away)
        blocks = pairs([(0, 0), (1, 1)])
        assert failed(pull(readers[1].agent, source_of(owners), blocks)) is Reason.STALE


def test_the_fastest_that_works_is_chosen_and_the_reason_told() -> None:
    of = layout()
    elsewhere = settings(machine="another machine")
    with group(of) as [owner], group(of) as [near], group(of, using=elsewhere) as [far]:
        for reader in (near, far):
            assert pull(reader.agent, source_of([owner]), pairs([(0, 0)])) is None
        [route] = near.agent.routes()
        assert route == (owner.agent.endpoint, "memory", "the fastest that works")
        [route] = far.agent.routes()
        assert route.transport == "sockets"
        assert route.reason.startswith("the fastest that works; memory: ")
        assert "the owner is on another machine; process_group: sockets are faster" in route.reason


def test_nothing_in_common_is_said_with_every_reason() -> None:
    of = layout()
    one, other = (settings(transports=(name,)) for name in ("sockets", "memory"))
    with group(of, using=one) as [owner], group(of, using=other) as [reader]:
        error = pull(reader.agent, source_of([owner]), pairs([(0, 0)]))
        assert failed(error) is Reason.UNSUPPORTED
        assert "memory: the owner does not offer it" in str(error)


@pytest.mark.parametrize("changed", [{"block_size": 8}, {"num_kv_heads": 7}, {"num_kv_heads": 1}])
def test_other_layouts_are_refused_with_both_values(changed: dict[str, int]) -> None:
    of = layout()
    [(name, value)] = changed.items()
    with group(of) as [owner], group(replace(of, **changed)) as [reader]:
        with pytest.raises(TransferFailed) as caught:
            pull(reader.agent, source_of([owner]), pairs([(0, 0)]))
        assert caught.value.reason is Reason.REFUSED
        assert f"{name} (here {value}, there {getattr(of, name)})" in str(caught.value)
        assert not reader.pool.any()


def test_a_source_that_is_not_what_was_told_is_refused() -> None:
    of = layout()
    with group(replace(of, num_layers=1)) as [owner], group(of) as [reader]:
        error = pull(reader.agent, source_group(of, [owner.agent.endpoint]), pairs([(0, 0)]))
        assert failed(error) is Reason.REFUSED
        assert "num_layers=1" in str(error) and "num_layers=2" in str(error)
        assert not reader.pool.any()


def test_ranks_that_are_told_in_the_wrong_order_are_refused() -> None:
    of = layout(tensor_parallel=2)
    with group(of) as owners, group(of) as readers:
        swapped = source_group(of, [owners[1].agent.endpoint, owners[0].agent.endpoint])
        error = pull(readers[0].agent, swapped, pairs([(0, 0)]))
        assert failed(error) is Reason.REFUSED
        assert "is rank 1 of a group" in str(error) and "expected is rank 0" in str(error)


def test_another_secret_is_not_let_in() -> None:
    of = layout()
    with group(of) as [owner], group(of, using=settings(secret=b"other")) as [reader]:
        assert failed(pull(reader.agent, source_of([owner]), pairs([(0, 0)]))) is Reason.UNREACHABLE
        assert not reader.pool.any()


def test_nobody_listens() -> None:
    of = layout()
    with group(of) as [owner]:
        source = source_of([owner])
    with group(of) as [reader]:
        assert failed(pull(reader.agent, source, pairs([(0, 0)]))) is Reason.UNREACHABLE


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_that_the_owner_does_not_have(transport: str) -> None:
    of = layout()
    using = settings(transports=(transport,))
    with group(of, using=using) as [owner], group(of, num_blocks=9, using=using) as [reader]:
        assert failed(pull(reader.agent, source_of([owner]), pairs([(NUM_BLOCKS, 0)]))) is Reason.REFUSED
        with pytest.raises(ValueError, match=r"pull of 1 blocks; outside the own pool: \[9\]"):
            pull(reader.agent, source_of([owner]), pairs([(0, 9)]))
        with pytest.raises(ValueError, match="pull of 0 blocks"):
            pull(reader.agent, source_of([owner]), [])


def test_orders_of_one_source_run_in_turn() -> None:
    of = layout()
    first_ends, go_on = Event(), Event()

    def hold(_: int, error: TransferFailed | None) -> None:
        assert error is None
        first_ends.set()
        assert go_on.wait(20)

    with group(of) as [owner], group(of) as [reader]:
        owner.fill(content(of, NUM_BLOCKS))
        source = source_of([owner])
        reader.agent.pull(source, Order(1, pairs([(0, 0)]), hold))
        assert first_ends.wait(20)
        second = Pull(reader.agent, source, pairs([(1, 1)]), pull_id=2)
        time.sleep(0.05)
        assert not reader.pool[1].any()
        go_on.set()
        assert second.error() is None
        assert torch.equal(reader.pool[:2], owner.pool[:2])


def test_close_ends_all_though_a_source_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller_module, "_END_TIMEOUT_S", 0.05)
    of = layout()
    begun, go_on = Event(), Event()

    def hang(*_: object) -> None:
        begun.set()
        assert go_on.wait(20)

    with group(of) as [owner], group(of) as [reader]:
        reader.agent.pull(source_of([owner]), Order(1, pairs([(0, 0)]), hang))
        assert begun.wait(20)
        with pytest.raises(RuntimeError, match=r"a KV puller of 127\.0\.0\.1:\d+ did not end in 0\.05 s"):
            reader.agent.close()
        with group(of) as [other]:
            assert failed(pull(other.agent, source_of([reader]), pairs([(0, 0)]))) is Reason.UNREACHABLE
        go_on.set()


def test_too_many_orders_are_refused() -> None:
    of = layout()
    go_on = Event()
    few = replace(settings(), max_orders=2)
    with group(of) as [owner], group(of, using=few) as [reader]:
        source = source_of([owner])
        started = Event()

        def hold(*_: object) -> None:
            started.set()
            assert go_on.wait(20)

        reader.agent.pull(source, Order(0, pairs([(0, 0)]), hold))
        assert started.wait(20)
        waiting = [Pull(reader.agent, source, pairs([(0, 0)]), pull_id=number) for number in (1, 2)]
        with pytest.raises(TransferFailed, match="refused: 2 orders wait"):
            pull(reader.agent, source, pairs([(0, 0)]))
        go_on.set()
        assert [one.error() for one in waiting] == [None, None]


def test_a_source_that_is_not_asked_any_more_loses_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    of = layout()
    with group(of) as [one], group(of) as [other], group(of) as [reader]:
        assert pull(reader.agent, source_of([one]), pairs([(0, 0)])) is None
        assert pull(reader.agent, source_of([other]), pairs([(0, 0)])) is None
        assert len(reader.agent.routes()) == 2
        monkeypatch.setattr(agent_module, "_IDLE_S", 0.0)
        time.sleep(0.05)
        assert pull(reader.agent, source_of([one]), pairs([(0, 0)])) is None
        assert [route.endpoint for route in reader.agent.routes()] == [one.agent.endpoint]
        deadline_s = time.monotonic() + 20
        while num_pullers() > 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert num_pullers() == 1


def num_pullers() -> int:
    return sum(thread.name == "tandem-kv-puller" for thread in threading.enumerate())


def test_a_source_that_is_asked_again_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = layout()
    with group(of) as [one], group(of) as [reader]:
        assert pull(reader.agent, source_of([one]), pairs([(0, 0)])) is None
        before = reader.agent._pullers[source_of([one])][0]
        monkeypatch.setattr(agent_module, "_IDLE_S", 0.0)
        time.sleep(0.05)
        assert pull(reader.agent, source_of([one]), pairs([(0, 0)])) is None
        assert reader.agent._pullers[source_of([one])][0] is before


def test_an_order_does_not_wait_for_the_threads_of_idle_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller_module, "_END_TIMEOUT_S", 0.05)
    started, go_on = Event(), Event()

    def hold(_pull_id: int, _error: TransferFailed | None) -> None:
        started.set()
        assert go_on.wait(20)

    of = layout()
    with group(of) as [one], group(of) as [other], group(of) as [reader]:
        reader.agent.pull(source_of([one]), Order(0, pairs([(0, 0)]), hold))
        assert started.wait(20)
        monkeypatch.setattr(agent_module, "_IDLE_S", 0.0)
        time.sleep(0.01)
        assert pull(reader.agent, source_of([other]), pairs([(0, 0)])) is None
        go_on.set()


def test_close_ends_orders_and_nothing_is_written_after_it() -> None:
    of = layout()
    with group(of) as [owner]:
        owner.fill(content(of, NUM_BLOCKS))
        reader = Rank(of, 0, num_blocks=NUM_BLOCKS)
        pulls = [
            Pull(reader.agent, source_of([owner]), pairs([(1, 1), (2, 2)]), pull_id=number)
            for number in range(100)
        ]
        reader.agent.close()
        ends = [one.error() for one in pulls]
        assert {error.reason for error in ends if error is not None} <= {Reason.CANCELLED}
        reader.pool.zero_()
        time.sleep(0.05)
        assert not reader.pool.any()
        with pytest.raises(TransferFailed, match="cancelled: this rank ends"):
            pull(reader.agent, source_of([owner]), pairs([(0, 0)]))
        reader.agent.close()


def test_what_does_not_fit_is_said_at_once() -> None:
    of = layout()

    def agent(**changed: object) -> Agent:
        given = {
            "pool": torch.zeros(8, 3, 2, 2, 4, 2),
            "layout": of,
            "rank": 0,
            "generations": np.zeros(8, dtype=np.int64),
            "host": "127.0.0.1",
            "settings": settings(),
        }
        return Agent(**{**given, **changed})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="has 192 bytes, by the layout it should have 384"):
        agent(pool=torch.zeros(8, 3, 2, 2, 4, 1))
    with pytest.raises(ValueError, match=r"generations \(7,\) int64 for a pool of 8 blocks"):
        agent(generations=np.zeros(7, dtype=np.int64))
    with pytest.raises(ValueError, match="rank 0 keeps the generations, and only rank 0"):
        agent(generations=None)
    with pytest.raises(ValueError, match="not contiguous"):
        agent(pool=torch.zeros(3, 8, 2, 2, 4, 2).transpose(0, 1))
    with pytest.raises(ValueError, match="choose from memory, process_group, sockets"):
        agent(settings=settings(transports=("pigeons",)))
    with pytest.raises(ValueError, match="2 endpoints for a group of 1 ranks"):
        source_group(of, [("127.0.0.1", 1), ("127.0.0.1", 2)])  # type: ignore[list-item]


def test_a_piece_outside_the_pool_never_becomes_an_address() -> None:
    of = layout()
    with group(of) as [owner], group(of) as [reader]:
        bad = (BlockRead(-1, 0, 0),)
        assert failed(pull(reader.agent, source_of([owner]), bad)) is Reason.REFUSED
