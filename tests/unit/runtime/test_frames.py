"""Frames on a stream of bytes: whole ones, split ones, nonsense."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from workers.ports import open_port
from workers.runtime.frames import FrameKind, FrameSocket, PeerClosed, PeerSilent, ProtocolError
from workers.runtime.handshake import new_token, welcome


def test_frames_of_nonsense_are_refused():
    listener = open_port("127.0.0.1")
    for noise, says in ((b"\xff\xff\xff\xff\x01", "4294967295 bytes"), (b"\0\0\0\0\x63", "kind 99")):
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        frames = FrameSocket(connection, timeout_s=1)
        client.sendall(noise)
        with pytest.raises(ProtocolError, match=says):
            frames.receive()
        frames.close()
        client.close()
    listener.close()


def test_frames_split_anywhere_come_out_whole():
    listener = open_port("127.0.0.1")
    client = socket.create_connection(listener.getsockname())
    connection, _ = listener.accept()
    listener.close()
    frames = FrameSocket(connection, timeout_s=1)
    message = b"\x03\0\0\0\x05abc" + b"\0\0\0\0\x06" + b"\x02\0\0\0\x05de"
    for byte in message:
        client.sendall(bytes([byte]))
    got = [frames.receive() for _ in range(3)]
    assert got == [(FrameKind.STEP, b"abc"), (FrameKind.HEARTBEAT, b""), (FrameKind.STEP, b"de")]
    with pytest.raises(PeerSilent, match="silent for 1 s"):
        frames.receive()
    client.close()
    with pytest.raises(PeerClosed):
        frames.receive()
    frames.close()


def test_what_came_along_with_a_greeting_is_heard_although_the_peer_has_left():
    listener = open_port("127.0.0.1")
    client = socket.create_connection(listener.getsockname())
    connection, _ = listener.accept()
    listener.close()
    frames = FrameSocket(connection, timeout_s=1)
    client.sendall(
        struct.pack("<IB", 1, FrameKind.HELLO) + b"a" + struct.pack("<IB", 2, FrameKind.FAULT) + b"no"
    )
    client.close()
    assert frames.receive_greeting(1, 1) == (FrameKind.HELLO, b"a")
    assert frames.receive_ready() == [(FrameKind.FAULT, b"no")]
    with pytest.raises(PeerClosed):
        frames.receive_ready()
    frames.close()


def _welcome(say: bytes, *, then_drip: bool = False) -> tuple[object, float]:
    """What rank 0 makes of a peer that says this, and then a byte every 50 ms for ever; seconds it took."""
    listener = open_port("127.0.0.1")
    client = socket.create_connection(listener.getsockname())
    connection, _ = listener.accept()
    listener.close()
    is_over = threading.Event()

    def talk() -> None:
        try:
            client.sendall(say)
            while then_drip and not is_over.wait(0.05):
                client.sendall(b"x")
        except OSError:
            return  # rank 0 has had enough

    talking = threading.Thread(target=talk)
    talking.start()
    began_s = time.monotonic()
    made = welcome(connection, new_token(), timeout_s=0.3)
    took_s = time.monotonic() - began_s
    is_over.set()
    talking.join(5)
    client.close()
    return made, took_s


def test_a_peer_that_drips_its_greeting_is_not_waited_for_beyond_the_time():
    made, took_s = _welcome(struct.pack("<IB", 40, FrameKind.HELLO), then_drip=True)
    assert made is None
    assert 0.25 < took_s < 1.5


def test_a_peer_that_is_not_known_yet_cannot_announce_a_large_frame():
    made, took_s = _welcome(struct.pack("<IB", 1 << 20, FrameKind.HELLO))
    assert made is None
    assert took_s < 0.25


def _pair() -> tuple[socket.socket, FrameSocket]:
    listener = open_port("127.0.0.1")
    client = socket.create_connection(listener.getsockname())
    connection, _ = listener.accept()
    listener.close()
    return client, FrameSocket(connection, timeout_s=0.6)


def test_who_stays_awake_sleeps_after_that_time():
    """By the time that the thread has computed."""
    client, frames = _pair()
    used_s = []
    for awake_s in (0.0, 0.2):
        began_s = time.thread_time()
        with pytest.raises(PeerSilent, match=r"silent for 0\.6 s"):
            frames.receive(awake_s)
        used_s.append(time.thread_time() - began_s)
    asleep_s, awake_s = used_s
    assert asleep_s < 0.02 < awake_s < 0.3
    client.close()
    frames.close()


def test_who_stays_awake_hears_frames_and_their_end():
    client, frames = _pair()
    sending = threading.Timer(0.1, client.sendall, [b"\x03\0\0\0\x05abc" + b"\0\0\0\0\x06"])
    sending.start()
    began_s = time.monotonic()
    assert frames.receive(60.0) == (FrameKind.STEP, b"abc")
    assert frames.receive(60.0) == (FrameKind.HEARTBEAT, b"")  # it came along
    threading.Timer(0.1, client.close).start()
    with pytest.raises(PeerClosed):
        frames.receive(60.0)
    assert time.monotonic() - began_s < 30
    frames.close()
