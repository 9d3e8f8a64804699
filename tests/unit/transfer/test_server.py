"""What a peer of bad will can do to the owner: nothing."""

from __future__ import annotations

import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

import workers.transfer.server as server
from tests.unit.transfer.layouts import layout
from tests.unit.transfer.ranks import (
    PATIENCE_S,
    SECRET,
    Load,
    Rank,
    compiled,
    content,
    group,
    no_compiler,
    pairs,
    pull,
    source_of,
)
from workers.transfer.link import PeerLink
from workers.transfer.messages import MAX_AHEAD, Check, Data, Read, Trailer, encode
from workers.transfer.transport import Reason, TransferFailed

OF = layout()
BLOCK_BYTES = OF.block_bytes(0)
GARBAGE = [
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\xff\xff\xff\xff" * 1000,
    b"\0" * 5000,
    encode(Check(number=1, blocks=(0,))),  # before the greeting
]


@contextmanager
def owner(load: Load = compiled) -> Iterator[Rank]:
    with group(OF, load=load) as [rank]:
        rank.fill(content(OF, 8))
        yield rank


def raw(rank: Rank) -> socket.socket:
    return socket.create_connection(rank.agent.endpoint, timeout=PATIENCE_S)


def greeted(rank: Rank) -> PeerLink:
    return PeerLink(rank.agent.endpoint, SECRET, timeout_s=PATIENCE_S)


def read(number: int = 1, **changed: object) -> Read:
    fields: dict[str, object] = {
        "number": number,
        "blocks": (0, 1),
        "generations": (0, 0),
        "offset": 0,
        "num_bytes": BLOCK_BYTES,
        "has_checksums": True,
    }
    return Read(**{**fields, **changed})  # type: ignore[arg-type]


def is_dropped(connection: socket.socket) -> bool:
    """Waits until the other end has closed."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def serves(rank: Rank) -> bool:
    with group(OF) as [reader]:
        assert pull(reader.agent, source_of([rank]), pairs([(3, 2)])) is None
        return bool((reader.pool[2] == rank.pool[3]).all())


@pytest.mark.parametrize("data", GARBAGE, ids=["http", "ff", "zeros", "early"])
def test_garbage_is_dropped_and_the_others_are_served(data: bytes) -> None:
    with owner() as rank, closing(raw(rank)) as hostile:
        hostile.sendall(data)
        assert is_dropped(hostile)
        assert serves(rank)


def test_a_connection_that_cannot_be_set_up_is_dropped_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with owner() as rank:
        with monkeypatch.context() as broken:
            broken.setattr(server, "_KEEP_ALIVE", ((socket.TCP_KEEPIDLE, -1),))  # the system says no
            with closing(raw(rank)) as peer:
                assert is_dropped(peer)
        assert serves(rank)


def test_noise_behind_a_greeting_harms_nobody() -> None:
    noise = random.Random(0)
    good = encode(read())
    with owner() as rank:
        for _ in range(200):
            frame = bytearray(good)
            for _ in range(noise.randint(1, 6)):
                frame[noise.randrange(len(frame))] = noise.randrange(256)
            with closing(greeted(rank)) as link:
                link._socket.sendall(bytes(frame[: noise.randint(1, len(frame))]) * noise.randint(1, 3))
        assert serves(rank)


def test_who_says_nothing_or_half_of_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GREETING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server, "_FRAME_TIMEOUT_S", 0.2)
    with owner() as rank, closing(raw(rank)) as silent, closing(greeted(rank)) as half:
        frame = encode(read())
        half._socket.sendall(frame[:7])
        assert is_dropped(silent)
        assert is_dropped(half._socket)
        assert serves(rank)


def test_drop_by_drop_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FRAME_TIMEOUT_S", 0.3)
    with owner() as rank, closing(greeted(rank)) as loris:
        started = time.monotonic()
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            for byte in encode(read()):
                loris._socket.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("load", [compiled, no_compiler])
def test_who_takes_no_bytes_is_dropped(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SEND_TIMEOUT_S", 0.3)
    large = layout(num_layers=64, block_size=64, head_dim=64)
    with group(large, load=load) as [rank], closing(greeted(rank)) as deaf:
        for number in range(MAX_AHEAD):
            deaf.send(read(number, num_bytes=large.block_bytes(0), blocks=(0, 1) * 8, generations=()))
        deadline = time.monotonic() + 10
        while rank.agent._server.num_peers:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_connections_without_a_greeting_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GREETING_TIMEOUT_S", 1.0)
    with owner() as rank:
        many = [raw(rank) for _ in range(100)]
        time.sleep(0.1)
        assert rank.agent._server.num_peers <= 32
        for connection in many:
            assert is_dropped(connection)
            connection.close()
        assert serves(rank)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (read(blocks=(0, 8)), "block 8 of a pool of 8"),
        (read(offset=1), "bytes 1 to 385 of blocks of 384 bytes"),
        (read(num_bytes=(1 << 40) - 1), "of blocks of 384 bytes"),
        (read(offset=(1 << 62) - 1), "of blocks of 384 bytes"),
        (read(generations=(0,)), "1 generations for 2 blocks"),
        (read(generations=(0, 1)), "belongs to somebody else"),
        (Check(number=1, blocks=(99,)), "block 99 of a pool of 8"),
    ],
)
def test_what_is_not_there_is_refused_by_name(request_: Read | Check, message: str) -> None:
    with owner() as rank, closing(greeted(rank)) as link:
        link.send(request_)
        with pytest.raises(TransferFailed, match=message) as caught:
            link.receive()
        assert caught.value.reason in (Reason.REFUSED, Reason.STALE)
        link.send(Check(number=2, blocks=(0,)))  # the connection goes on
        assert link.receive().number == 2  # type: ignore[union-attr]


def test_asking_far_ahead_is_dropped() -> None:
    with owner() as rank, closing(greeted(rank)) as greedy:
        greedy._socket.sendall(b"".join(encode(read(number)) for number in range(100)))
        assert is_dropped(greedy._socket)
        assert serves(rank)


@pytest.mark.parametrize("load", [compiled, no_compiler])
def test_a_huge_request_takes_no_memory(load: Load) -> None:
    with owner(load) as rank, closing(greeted(rank)) as link:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        link.send(read(blocks=(7,) * 256, generations=(), has_checksums=False))
        assert link.receive() == Data(number=1)
        link.receive_into(memoryview(bytearray(256 * BLOCK_BYTES)))
        assert link.receive() == Trailer(number=1, is_current=True, checksums=())
        link._socket.sendall(b"\xff\xff\xff\x7f\x03")
        assert is_dropped(link._socket)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_close_ends_connections_and_the_port() -> None:
    with owner() as rank:
        link = greeted(rank)
        rank.agent.close()
        assert is_dropped(link._socket)
        with pytest.raises(TransferFailed, match="no connection"):
            greeted(rank)
        link.close()
