"""Blocks through a socket by C++: places, checksums, frames; ends that come too early, too late or never."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest

from workers.kernels import BlockAnswer, BlockStream, load_library
from workers.transfer.messages import MAX_FRAME_BYTES, PROTOCOL, Data, Refused, Trailer, encode
from workers.transfer.pool_bytes import checksum

PATIENCE_S = 20.0
NUMBER = 300
BEFORE = encode(Data(number=NUMBER))
REFUSED = encode(Refused(number=NUMBER, reason="stale", message="a block belongs to somebody else by now"))


class Pool:
    """(num_blocks, block_bytes) random bytes, and their generations."""

    def __init__(self, block_bytes: int, seed: int, num_blocks: int = 5) -> None:
        generator = np.random.default_rng(seed)
        self.bytes = generator.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        self.generations = generator.integers(0, 1 << 62, num_blocks)

    def stream(
        self, blocks: list[int], offset: int, num_bytes: int, *, has_checksums: bool = True
    ) -> BlockStream:
        address, stride = self.bytes.ctypes.data + offset, self.bytes.shape[1]
        given = {"first": address, "stride": stride, "num_bytes": num_bytes}
        return BlockStream(load_library(), blocks, has_checksums=has_checksums, **given)

    def answer(self, stream: BlockStream, blocks: list[int], number: int = NUMBER) -> BlockAnswer:
        wanted = [int(self.generations[block]) for block in blocks]
        before = encode(Data(number=number))
        return BlockAnswer(stream, before, number, self.generations.ctypes.data, wanted)

    def whole(self, blocks: list[int]) -> BlockAnswer:
        return self.answer(self.stream(blocks, 0, self.bytes.shape[1]), blocks)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        yield left, right


def send_all(answer: BlockAnswer, connection: socket.socket, max_bytes: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not answer.is_done:
        try:
            assert answer.send(connection.fileno(), max_bytes) > 0
        except BlockingIOError:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


def receive(
    stream: BlockStream,
    connection: socket.socket,
    timeout_s: float = PATIENCE_S,
    before: bytes = BEFORE,
    room: int = MAX_FRAME_BYTES,
) -> object:
    """The message that is in the frame then."""
    frame = array("B", bytes(room))
    stream.receive(connection.fileno(), timeout_s, before, frame)
    length = PROTOCOL.frame_length(frame[:4].tobytes(), room - 4)
    return PROTOCOL.decode(frame[4], frame[5 : 4 + length].tobytes())


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
def test_pieces_and_checksums_come_as_they_were(
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
    sender = Thread(target=send_all, args=(source.answer(out, there), ends[0], max_bytes))
    sender.start()
    trailer = receive(into, ends[1])
    sender.join()
    assert into.is_done and np.array_equal(target.bytes, expected)
    sums = tuple(checksum(source.bytes[block, offset : offset + num_bytes].copy().data) for block in there)
    assert trailer == Trailer(number=NUMBER, is_current=True, checksums=sums)
    assert out.checksums == into.checksums == sums


@pytest.mark.parametrize("number", [0, 255, (1 << 32) - 1])
def test_checksums_are_made_where_they_are_wanted(
    ends: tuple[socket.socket, socket.socket], number: int
) -> None:
    source, target = Pool(8192, 1), Pool(8192, 2)
    out = source.stream([3], 0, 8192, has_checksums=False)
    send_all(source.answer(out, [3], number), ends[0], 1 << 30)
    into, before = target.stream([4], 0, 8192, has_checksums=False), encode(Data(number=number))
    assert receive(into, ends[1], before=before) == Trailer(number=number, is_current=True, checksums=())
    assert np.array_equal(target.bytes[4], source.bytes[3])
    assert out.checksums == into.checksums == ()


@pytest.mark.parametrize("given_away", [1, 2, 3])
def test_a_block_that_is_given_away_before_the_trailer_is_not_current(
    ends: tuple[socket.socket, socket.socket], given_away: int
) -> None:
    """Its checksum is still that of the bytes that were sent, also of its end behind the last whole page."""
    source, target = Pool(10_000, 1), Pool(10_000, 2)
    blocks = [1, 2]
    answer = source.whole(blocks)
    assert answer.send(ends[0].fileno(), 20_000) == len(BEFORE) + 20_000 and not answer.is_done
    sent = source.bytes[blocks]
    source.generations[given_away] += 1
    source.bytes[given_away] = 7
    send_all(answer, ends[0], 1 << 30)
    into = target.stream([3, 4], 0, 10_000)
    trailer = receive(into, ends[1])
    assert isinstance(trailer, Trailer) and trailer.is_current is (given_away not in blocks)
    assert trailer.checksums == into.checksums and np.array_equal(target.bytes[3:], sent)


def test_who_takes_nothing_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    answer = Pool(1 << 20, 1).whole(list(range(5)))
    sent = answer.send(ends[0].fileno(), 1 << 30)
    assert 0 < sent < 5 << 20 and not answer.is_done
    with pytest.raises(BlockingIOError):
        answer.send(ends[0].fileno(), 1 << 30)
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        answer.send(ends[0].fileno(), 1 << 30)


@pytest.mark.parametrize("other", [REFUSED, encode(Data(number=NUMBER + 1)), encode(Data(number=1))])
def test_nothing_is_filled_behind_another_frame(
    ends: tuple[socket.socket, socket.socket], other: bytes
) -> None:
    pool = Pool(8192, 1)
    before, stream = pool.bytes.copy(), pool.stream([0, 1], 0, 8192)
    ends[0].send(other + bytes(10_000))
    assert receive(stream, ends[1]) == PROTOCOL.decode(other[4], other[5:])
    assert not stream.is_done and np.array_equal(pool.bytes, before)
    assert ends[1].recv(20_000, socket.MSG_DONTWAIT) == bytes(10_000)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("length", [0, 61, (1 << 32) - 1])
def test_of_a_frame_without_room_the_length_alone_is_there(
    ends: tuple[socket.socket, socket.socket], length: int, behind: bool
) -> None:
    pool = Pool(8192, 1)
    ends[0].send((BEFORE + bytes(8192) if behind else b"") + struct.pack("<I", length) + b"\5" * 1000)
    frame = array("B", bytes(64))
    pool.stream([0], 0, 8192).receive(ends[1].fileno(), PATIENCE_S, BEFORE, frame)
    assert frame[:5].tobytes() == struct.pack("<I", length) + b"\5"
    assert frame[40:].tobytes() == bytes(24)


def test_an_end_in_the_middle_of_a_piece(ends: tuple[socket.socket, socket.socket]) -> None:
    pool = Pool(8192, 1)
    before = pool.bytes.copy()
    ends[0].send(BEFORE + bytes(10000))
    ends[0].close()
    stream = pool.stream([0, 1, 2], 0, 8192)
    with pytest.raises(EOFError):
        receive(stream, ends[1])
    assert not stream.is_done
    before[0], before[1, :1808] = 0, 0
    assert np.array_equal(pool.bytes, before)


@pytest.mark.parametrize(
    "sent", [b"", BEFORE[:7], BEFORE, BEFORE + bytes(8192), BEFORE + bytes(8192) + b" \0\0\0\5"]
)
def test_a_wait_ends_by_the_timeout_of_the_system(
    ends: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    pool = Pool(8192, 1)
    ends[0].send(sent)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 100_000))
    with pytest.raises(BlockingIOError):
        receive(pool.stream([0], 0, 8192), ends[1])


@pytest.mark.parametrize("sent", [BEFORE[:7], BEFORE])
def test_signals_do_not_lengthen_a_wait(ends: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    """Each begins that of the system anew."""
    waiting, is_over = threading.get_ident(), threading.Event()

    def disturb() -> None:
        for _ in range(100):  # 2 s
            if is_over.wait(0.02):
                return
            signal.pthread_kill(waiting, signal.SIGUSR1)
        ends[0].close()

    ends[0].send(sent)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 300_000))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    disturbing = Thread(target=disturb)
    disturbing.start()
    try:
        with pytest.raises(TimeoutError):
            receive(Pool(8192, 1).stream([0], 0, 8192), ends[1], timeout_s=0.3)
    finally:
        is_over.set()
        disturbing.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("sent", "drop"), [(b"\0\x20\0\0", b"x"), (BEFORE, b"x" * 100)], ids=["frame", "piece"]
)
def test_what_comes_drop_by_drop_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket], sent: bytes, drop: bytes
) -> None:
    def drip() -> None:
        for _ in range(200):
            try:
                ends[0].send(drop)
            except OSError:
                return
            time.sleep(0.01)

    pool = Pool(8192, 1)
    ends[0].send(sent)
    dripping = Thread(target=drip)
    dripping.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(pool.stream([0, 1], 0, 8192), ends[1], timeout_s=0.3)
    assert 0.3 <= time.monotonic() - started < 1.0  # a piece of 8,192 bytes takes 0.8 s so
    ends[1].close()
    dripping.join()
