"""Frames on a stream of bytes: whole ones, split ones, nonsense."""

from __future__ import annotations

import socket

import pytest

from workers.runtime.frames import FrameKind, FrameSocket, PeerClosed, PeerSilent, ProtocolError
from workers.runtime.handshake import open_port


def test_frames_of_nonsense_are_refused():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.close()
    theirs.close()
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
