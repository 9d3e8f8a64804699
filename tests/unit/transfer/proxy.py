"""A wire that can be bad: passes bytes between a reader and an owner, and does things to the owner's."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from workers.transfer.link import Endpoint

# (bytes passed since it was set, chunk) -> what is passed on instead; None: the wire breaks.
Change = Callable[[int, bytes], bytes | None]


class Proxy:
    """For one connection."""

    def __init__(self, owner: Endpoint) -> None:
        self._owner = owner
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._change: Change = lambda _, chunk: chunk
        self._passed = 0
        self._sockets = [self._listener]
        Thread(target=self._accept, daemon=True).start()

    def change(self, change: Change) -> None:
        """From the next byte of the owner."""
        self._passed, self._change = 0, change

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            reader, _ = self._listener.accept()
            owner = socket.create_connection(self._owner, timeout=10)
            self._sockets += [reader, owner]
            Thread(target=self._pass, args=(reader, owner, lambda chunk: chunk), daemon=True).start()
            self._pass(owner, reader, self._changed)

    def _changed(self, chunk: bytes) -> bytes | None:
        start, self._passed = self._passed, self._passed + len(chunk)
        return self._change(start, chunk)

    def _pass(
        self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes | None]
    ) -> None:
        with contextlib.suppress(OSError):
            while (chunk := source.recv(4096)) and (out := change(chunk)) is not None:
                target.sendall(out)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(owner: Endpoint) -> Iterator[Proxy]:
    wire = Proxy(owner)
    try:
        yield wire
    finally:
        wire.close()
