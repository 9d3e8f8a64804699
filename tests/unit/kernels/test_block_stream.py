"""Blocks through a socket by C++: places, sums, and ends that come too early, too late or never."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest

from workers.kernels import BlockStream, load_library

PATIENCE_S = 20.0


class Pool:
    """(num_blocks, block_bytes) random bytes."""

    def __init__(self, block_bytes: int, seed: int, num_blocks: int = 5) -> None:
        generator = np.random.default_rng(seed)
        self.bytes = generator.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)

    def stream(self, blocks: list[int], offset: int, num_bytes: int, *, has_sums: bool = True) -> BlockStream:
        address, stride = self.bytes.ctypes.data + offset, self.bytes.shape[1]
        given = {"first": address, "stride": stride, "num_bytes": num_bytes}
        return BlockStream(load_library(), blocks, has_sums=has_sums, **given)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        yield left, right


def send_all(stream: BlockStream, connection: socket.socket, max_bytes: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not stream.is_done:
        try:
            assert stream.send(connection.fileno(), max_bytes) > 0
        except BlockingIOError:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


def sums_of(data: np.ndarray) -> bytes:
    """As pool_bytes.checksum has them."""
    whole = data[: len(data) // 4096 * 4096].view(np.uint64).reshape(-1, 512)
    return bytes(whole.sum(axis=1, dtype=np.uint64))


@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
@pytest.mark.parametrize(
    ("block_bytes", "offset", "num_bytes", "count"),
    [
        (3, 1, 1, 200),  # more pieces than go into a call of the system
        (4096, 0, 4096, 70),
        (8200, 5, 8191, 5),
        (8200, 8, 8192, 5),
        (3 << 20, 4097, (3 << 20) - 4097, 2),  # longer than what goes into one
    ],
)
def test_pieces_and_sums_come_as_they_were(
    ends: tuple[socket.socket, socket.socket],
    max_bytes: int,
    block_bytes: int,
    offset: int,
    num_bytes: int,
    count: int,
) -> None:
    source, target = (Pool(block_bytes, seed, count) for seed in (1, 2))
    expected = target.bytes.copy()
    there, here = list(range(count))[::-1], list(range(count))
    for one, other in zip(there, here, strict=True):
        expected[other, offset : offset + num_bytes] = source.bytes[one, offset : offset + num_bytes]
    out, into = source.stream(there, offset, num_bytes), target.stream(here, offset, num_bytes)
    sender = Thread(target=send_all, args=(out, ends[0], max_bytes))
    sender.start()
    into.receive(ends[1].fileno(), PATIENCE_S)
    sender.join()
    assert into.is_done and np.array_equal(target.bytes, expected)
    for index, block in enumerate(there):
        sums = sums_of(source.bytes[block, offset : offset + num_bytes].copy())
        assert out.page_sums(index).tobytes() == into.page_sums(index).tobytes() == sums


def test_sums_are_made_where_they_are_wanted(ends: tuple[socket.socket, socket.socket]) -> None:
    source, target = Pool(8192, 1), Pool(8192, 2)
    out = source.stream([3], 0, 8192, has_sums=False)
    send_all(out, ends[0], 1 << 30)
    target.stream([4], 0, 8192, has_sums=False).receive(ends[1].fileno(), PATIENCE_S)
    assert np.array_equal(target.bytes[4], source.bytes[3])
    assert not out.page_sums(0).nbytes


def test_who_takes_nothing_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    pool = Pool(1 << 20, 1)
    stream = pool.stream(list(range(5)), 0, 1 << 20)
    sent = stream.send(ends[0].fileno(), 1 << 30)
    assert 0 < sent < 5 << 20 and not stream.is_done
    with pytest.raises(BlockingIOError):
        stream.send(ends[0].fileno(), 1 << 30)
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        stream.send(ends[0].fileno(), 1 << 30)


def test_an_end_in_the_middle_of_a_piece(ends: tuple[socket.socket, socket.socket]) -> None:
    pool = Pool(8192, 1)
    before = pool.bytes.copy()
    ends[0].send(bytes(10000))
    ends[0].close()
    stream = pool.stream([0, 1, 2], 0, 8192)
    with pytest.raises(EOFError):
        stream.receive(ends[1].fileno(), PATIENCE_S)
    assert not stream.is_done
    before[0], before[1, :1808] = 0, 0
    assert np.array_equal(pool.bytes, before)


def test_a_wait_ends_by_the_timeout_of_the_system(ends: tuple[socket.socket, socket.socket]) -> None:
    pool = Pool(8192, 1)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 100_000))
    with pytest.raises(BlockingIOError):
        pool.stream([0], 0, 8192).receive(ends[1].fileno(), PATIENCE_S)


def test_signals_do_not_lengthen_a_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    """Each begins that of the system anew."""
    waiting, is_over = threading.get_ident(), threading.Event()

    def disturb() -> None:
        for _ in range(100):  # 2 s
            if is_over.wait(0.02):
                return
            signal.pthread_kill(waiting, signal.SIGUSR1)
        ends[0].close()

    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 300_000))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    disturbing = Thread(target=disturb)
    disturbing.start()
    try:
        with pytest.raises(TimeoutError):
            Pool(8192, 1).stream([0], 0, 8192).receive(ends[1].fileno(), 0.3)
    finally:
        is_over.set()
        disturbing.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_piece_that_comes_drop_by_drop_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    def drip() -> None:
        for _ in range(200):
            try:
                ends[0].send(b"x" * 100)
            except OSError:
                return
            time.sleep(0.01)

    pool = Pool(8192, 1)
    dripping = Thread(target=drip)
    dripping.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        pool.stream([0, 1], 0, 8192).receive(ends[1].fileno(), 0.3)
    assert 0.3 <= time.monotonic() - started < 1.0  # a piece of 8,192 bytes takes 0.8 s so
    ends[1].close()
    dripping.join()
