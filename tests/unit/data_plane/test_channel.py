"""How much may wait for a peer before it is dropped."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tests.unit.data_plane.fakes import run
from workers.data_plane.channel import Channel


class SlowPeer:
    """A transport whose other end takes bytes only when told to."""

    def __init__(self) -> None:
        self.waiting = 0
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def get_extra_info(self, _name: str) -> None:
        return None

    def abort(self) -> None:
        self.is_aborted = True


def channel_to(peer: SlowPeer) -> Channel:
    channel = Channel(on_message=lambda *_: None, on_closed=lambda *_: None, max_outgoing_bytes=1000)
    channel.connection_made(cast(asyncio.BaseTransport, cast(Any, peer)))
    return channel


def test_a_peer_is_dropped_when_more_than_the_limit_waits() -> None:
    async def test() -> None:
        peer = SlowPeer()
        channel = channel_to(peer)
        for _ in range(3):
            channel.write(b"x" * 500)  # the last one finds 1000 bytes waiting, which is not more
        assert not peer.is_aborted
        channel.write(b"x")
        assert peer.is_aborted

    run(test())


def test_a_snapshot_above_the_limit_has_time_to_be_read() -> None:
    async def test() -> None:
        peer = SlowPeer()
        channel = channel_to(peer)
        channel.write(b"x" * 5000)
        for _ in range(10):
            channel.write(b"x" * 100)  # waits behind it
        assert (peer.waiting, peer.is_aborted) == (6000, False)
        channel.write(b"x" * 100)
        channel.write(b"x" * 100)
        assert peer.is_aborted

    run(test())


def test_once_the_snapshot_is_read_the_limit_is_as_before() -> None:
    async def test() -> None:
        peer = SlowPeer()
        channel = channel_to(peer)
        channel.write(b"x" * 5000)
        peer.waiting = 0
        for _ in range(3):
            channel.write(b"x" * 600)
        assert peer.is_aborted

    run(test())
