"""A router of a few lines, in front of a real server."""

from __future__ import annotations

from tests.unit.data_plane.fakes import (
    SECRET,
    FakeGroup,
)
from workers.data_plane.channel import Channel, ClientIdentity, connect
from workers.data_plane.wire import (
    Chunks,
    Events,
    Message,
    Ping,
    Pong,
    Snapshot,
)
from workers.types import TokenChunk


class Reader:
    """A router of a few lines: keeps every message, answers heartbeats."""

    def __init__(self, client_id: str = "router", *, secret: bytes = SECRET, answers: bool = True) -> None:
        self.identity = ClientIdentity(client_id=client_id, secret=secret, subscribes=True)
        self.answers = answers
        self.messages: list[Message] = []
        self.reason: str | None = None
        self.channel: Channel | None = None

    async def connect(self, group: FakeGroup) -> Reader:
        address = group.address
        self.channel, _ = await connect(
            address.host, address.port, self.identity, on_message=self._message, on_closed=self._closed
        )
        return self

    def send(self, message: Message) -> None:
        assert self.channel is not None
        self.channel.send(message)

    @property
    def frames(self) -> list[Chunks]:
        return [message for message in self.messages if isinstance(message, Chunks)]

    @property
    def chunks(self) -> list[TokenChunk]:
        return [chunk for frame in self.frames for chunk in frame.chunks]

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        return [
            token
            for chunk in self.chunks
            if chunk.request_id == name and chunk.choice == choice
            for token in chunk.token_ids
        ]

    @property
    def log(self) -> list[Snapshot | Events]:
        return [message for message in self.messages if isinstance(message, Snapshot | Events)]

    def _message(self, channel: Channel, message: Message) -> None:
        self.messages.append(message)
        if self.answers and isinstance(message, Ping):
            channel.send(Pong())

    def _closed(self, _channel: Channel, reason: str) -> None:
        self.reason = reason
