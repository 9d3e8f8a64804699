"""Owners that die, stop or give blocks away in the middle of a read, and bad wires; real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import workers.transfer.cross_memory as cross_memory
from tests.unit.transfer.processes import Child, Processes, layout_of
from tests.unit.transfer.proxy import Proxy, proxy
from tests.unit.transfer.ranks import MACHINE, PATIENCE_S, SECRET, Rank, compiled, pairs, pull, settings
from workers.kernels import Library
from workers.transfer.choice import TRANSPORTS, choose
from workers.transfer.cross_memory import CrossMemoryReader
from workers.transfer.layout import reads
from workers.transfer.link import Endpoint, PeerLink
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.puller import source_group
from workers.transfer.sockets import SocketReader
from workers.transfer.transport import Reason, TransferFailed
from workers.types import BlockRead

NUM_BLOCKS = 8
BLOCKS = pairs([(block, block) for block in range(NUM_BLOCKS)])


class Setup:
    """An owner in another process and a pool of this one."""

    def __init__(
        self,
        owner: Child,
        block_kib: int = 64,
        num_blocks: int = NUM_BLOCKS,
        library: Library | None = None,
    ) -> None:
        self.owner = owner
        self.layout = layout_of(block_kib)
        self.pieces = reads(self.layout, 0, self.layout)
        pool = torch.zeros(num_blocks, self.layout.block_bytes(0), dtype=torch.uint8)
        self.pool = PoolBytes(pool, library)

    def link(self, endpoint: Endpoint | None = None, timeout_s: float = PATIENCE_S) -> PeerLink:
        return PeerLink(endpoint or self.owner.endpoint, SECRET, timeout_s=timeout_s)

    def memory(self) -> CrossMemoryReader:
        return CrossMemoryReader(self.link(), self.pool, MACHINE)

    def sockets(self, endpoint: Endpoint, *, has_checksums: bool = True) -> SocketReader:
        return SocketReader(self.link(endpoint), self.pool, has_checksums=has_checksums)

    def arrived(self) -> list[int]:
        """Blocks that are whole."""
        return [block for block in range(NUM_BLOCKS) if bool((self.pool.blocks[block] == block + 1).all())]


@pytest.fixture
def setup(processes: Processes) -> Setup:
    return Setup(processes.owner(NUM_BLOCKS, 64), library=compiled())


@pytest.fixture(params=["C++", "Python", "Python to C++", "C++ to Python"])
def wired(processes: Processes, request: pytest.FixtureRequest) -> Setup:
    """By which the owner sends and the reader takes bytes."""
    owner, reader = (request.param.split(" to ") * 2)[:2]
    child = processes.owner(NUM_BLOCKS, 64, is_compiled=owner == "C++")
    return Setup(child, library=compiled() if reader == "C++" else None)


def reason_of(action: Callable[[], object]) -> Reason:
    with pytest.raises(TransferFailed) as caught:
        action()
    return caught.value.reason


@contextmanager
def before_call(reader: CrossMemoryReader, number: int, act: Callable[[], object]) -> Iterator[None]:
    """Acts before that copy of one block, counted from 0."""
    real, calls = reader._read_memory, iter(range(10**6))

    def call(*arguments: int) -> int:
        if next(calls) == number:
            act()
        return real(*arguments)

    reader._read_memory = call
    yield


@pytest.mark.parametrize(("after", "arrived"), [(0, 0), (4, 4)])
def test_the_owner_is_killed_while_its_memory_is_read(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, after: int, arrived: int
) -> None:
    monkeypatch.setattr(cross_memory, "_CALL_BYTES", setup.pool.block_bytes)  # a call for each block
    reader = setup.memory()
    with before_call(reader, after, setup.owner.kill):
        assert reason_of(lambda: reader.read(BLOCKS, setup.pieces)) is Reason.UNREACHABLE
    assert setup.arrived() == list(range(arrived))


def test_what_was_read_before_the_end_of_the_owner_is_good(setup: Setup) -> None:
    reader = setup.memory()
    reader.read(BLOCKS, setup.pieces)
    setup.owner.kill()
    assert setup.arrived() == list(range(NUM_BLOCKS))
    assert reason_of(lambda: reader.read(BLOCKS, setup.pieces)) is Reason.UNREACHABLE


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_owner_is_killed_while_it_sends(wired: Setup, share: float) -> None:
    whole = NUM_BLOCKS * wired.pool.block_bytes
    with proxy(wired.owner.endpoint) as wire:
        reader = wired.sockets(wire.endpoint)
        limit = int(share * whole)

        def kill(passed: int, chunk: bytes) -> bytes:
            if passed + len(chunk) > limit:
                wired.owner.kill()
                return chunk[: max(0, limit - passed)]
            return chunk

        wire.change(kill)
        started = time.monotonic()
        assert reason_of(lambda: reader.read(BLOCKS, wired.pieces)) is Reason.UNREACHABLE
        assert time.monotonic() - started < 5


def test_a_stopped_owner_is_read_from_memory_but_sends_nothing(setup: Setup) -> None:
    memory = setup.memory()
    sockets = SocketReader(setup.link(timeout_s=0.3), setup.pool)
    setup.owner.stop()
    started = time.monotonic()
    assert reason_of(lambda: sockets.read(BLOCKS, setup.pieces)) is Reason.TIMEOUT
    assert reason_of(lambda: setup.link(timeout_s=0.3)) is Reason.TIMEOUT
    assert 0.6 <= time.monotonic() - started < 3
    assert setup.arrived() == []
    memory.read(BLOCKS, setup.pieces)
    assert setup.arrived() == list(range(NUM_BLOCKS))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_owner_and_an_end_of_the_reader(setup: Setup, transport: str) -> None:
    of = setup.layout
    reader = Rank(of, 0, num_blocks=NUM_BLOCKS, using=settings(transports=(transport,), timeout_s=0.3))
    source = source_group(of, [setup.owner.endpoint])
    setup.owner.stop()
    error = pull(reader.agent, source, BLOCKS)
    assert error is not None and error.reason is Reason.TIMEOUT
    reader.agent.close()
    setup.owner.go_on()
    time.sleep(0.2)
    assert not reader.pool.any()


def test_a_block_is_given_away_while_memory_is_read(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_memory, "_CALL_BYTES", setup.pool.block_bytes)
    reader = setup.memory()
    with before_call(reader, 5, lambda: setup.owner.ask("bump 5")):
        assert reason_of(lambda: reader.read(BLOCKS, setup.pieces)) is Reason.STALE


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_block_is_given_away_while_it_is_sent(processes: Processes, is_compiled: bool) -> None:
    # 32 MiB: more than what the system holds for a reader that does not read.
    owner = processes.owner(1, 32 << 10, is_compiled=is_compiled)
    setup = Setup(owner, block_kib=32 << 10, num_blocks=1, library=compiled())
    with proxy(setup.owner.endpoint) as wire:
        reader = setup.sockets(wire.endpoint)
        is_given = False

        def give_away(passed: int, chunk: bytes) -> bytes:
            nonlocal is_given
            if not is_given:
                is_given = True
                setup.owner.ask("bump 0")
            return chunk

        wire.change(give_away)
        assert reason_of(lambda: reader.read(BLOCKS[:1], setup.pieces)) is Reason.STALE


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_flipped_bit_is_seen_by_the_checksum_alone(wired: Setup, has_checksums: bool) -> None:
    place = 3 * wired.pool.block_bytes + 1000

    def flip(passed: int, chunk: bytes) -> bytes:
        changed = bytearray(chunk)
        if passed <= place < passed + len(chunk):
            changed[place - passed] ^= 1
        return bytes(changed)

    with proxy(wired.owner.endpoint) as wire:
        reader = wired.sockets(wire.endpoint, has_checksums=has_checksums)
        wire.change(flip)
        if has_checksums:
            assert reason_of(lambda: reader.read(BLOCKS, wired.pieces)) is Reason.DAMAGED
        else:
            reader.read(BLOCKS, wired.pieces)
        assert wired.arrived() == [0, 1, 2, 4, 5, 6, 7]


def cut(passed: int, chunk: bytes) -> bytes | None:
    return chunk if passed < 100_000 else None


def double(_: int, chunk: bytes) -> bytes:
    return chunk + chunk


def leave_out(passed: int, chunk: bytes) -> bytes:
    return b"" if 100_000 < passed < 110_000 else chunk


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (cut, {Reason.UNREACHABLE}),
        (double, {Reason.PROTOCOL, Reason.DAMAGED}),
        (leave_out, {Reason.TIMEOUT}),
        (lambda *_: b"", {Reason.TIMEOUT}),
        (lambda *_: b"\xff" * 100, {Reason.PROTOCOL}),
        (lambda *_: b"\0" * 100, {Reason.PROTOCOL}),
    ],
    ids=["cut", "double", "left out", "silent", "ff", "zeros"],
)
def test_a_bad_wire(wired: Setup, change: Callable[[int, bytes], bytes | None], reasons: set[Reason]) -> None:
    with proxy(wired.owner.endpoint) as wire:
        reader = SocketReader(wired.link(wire.endpoint, timeout_s=0.5), wired.pool)
        wire.change(change)
        started = time.monotonic()
        assert reason_of(lambda: reader.read(BLOCKS, wired.pieces)) in reasons
        assert time.monotonic() - started < 5


def test_a_doubled_answer_is_not_taken_for_the_next(setup: Setup) -> None:
    answers: list[bytes] = []
    with proxy(setup.owner.endpoint) as wire:
        reader = setup.sockets(wire.endpoint)

        def keep(_: int, chunk: bytes) -> bytes:
            answers.append(chunk)
            return chunk

        wire.change(keep)
        reader.check(BLOCKS)
        wire.change(lambda *_: b"".join(answers))
        assert reason_of(lambda: reader.check(BLOCKS)) is Reason.PROTOCOL


def test_another_process_under_the_number_of_the_owner_is_noticed(setup: Setup) -> None:
    reader = setup.memory()
    reader._facts = replace(reader._facts, pid=os.getpid())
    assert reason_of(lambda: reader.read(BLOCKS, setup.pieces)) is Reason.UNREACHABLE
    address = torch.zeros(32, dtype=torch.uint8)  # memory that both have, with other content
    reader._facts = replace(reader._facts, proof_address=address.data_ptr(), pool_address=setup.pool.address)
    reader._facts = replace(reader._facts, generations_address=0)
    with pytest.raises(TransferFailed, match="is not the owner"):
        reader.read(BLOCKS, setup.pieces)


def test_a_read_that_the_system_cuts_short_goes_on(setup: Setup) -> None:
    reader = setup.memory()
    real = reader._read_memory

    def short(pid: int, local: int, num_local: int, remote: int, num_remote: int, flags: int) -> int:
        return real(pid, local, min(num_local, 3), remote, min(num_remote, 2), flags)

    reader._read_memory = short
    reader.read(BLOCKS, setup.pieces)
    assert setup.arrived() == list(range(NUM_BLOCKS))


def test_an_owner_that_gave_up_its_pool_is_not_read(setup: Setup) -> None:
    of = setup.layout
    owner = Rank(of, 0, num_blocks=NUM_BLOCKS)
    reader = CrossMemoryReader(setup.link(owner.agent.endpoint), setup.pool, MACHINE)
    reader.read(BLOCKS, setup.pieces)
    owner.agent.close()
    assert reason_of(lambda: reader.read(BLOCKS, setup.pieces)) is Reason.UNREACHABLE


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_reader_leaves_the_owner_unharmed(
    setup: Setup, processes: Processes, transport: str
) -> None:
    reader = processes.reader(setup.owner.endpoint.port, transport)
    assert reader.line() == "read\n"
    assert setup.owner.ask("peers") == 1
    reader.kill()
    deadline = time.monotonic() + 5
    while setup.owner.ask("peers"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    setup.sockets(setup.owner.endpoint).read(BLOCKS, setup.pieces)
    assert setup.arrived() == list(range(NUM_BLOCKS))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as somebody else")
def test_a_reader_that_may_not_is_told_what_to_change(setup: Setup, processes: Processes) -> None:
    said = processes.reader(setup.owner.endpoint.port, "memory", user=65534).line()
    assert said.startswith("unsupported: no transport works")
    assert "(EPERM): both processes must run as one user, kernel.yama.ptrace_scope (now" in said


def test_where_memory_cannot_be_read_sockets_are_chosen(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise TransferFailed(Reason.UNSUPPORTED, "this system has no process_vm_readv")

    monkeypatch.setattr(cross_memory, "_bind", refuse)
    choice = choose(setup.link(), setup.pool, MACHINE, TRANSPORTS, timeout_s=5.0)
    assert choice.reader.name == "sockets"
    assert "this system has no process_vm_readv" in choice.reason
    choice.reader.read([BlockRead(1, 0, 1)], setup.pieces)
    assert setup.arrived() == [1]


def test_a_cancelled_read_ends_at_once(wired: Setup) -> None:
    with proxy(wired.owner.endpoint) as wire:
        reader = wired.sockets(wire.endpoint)

        def cancel(wire: Proxy = wire) -> None:
            wire.change(lambda *_: b"")

        def stop(passed: int, chunk: bytes) -> bytes:
            if passed > 100_000:
                reader.cancel()
                cancel()
            return chunk

        wire.change(stop)
        started = time.monotonic()
        assert reason_of(lambda: reader.read(BLOCKS, wired.pieces)) is Reason.CANCELLED
        assert time.monotonic() - started < 5
