"""The reader's connection alone, with an owner that says nothing, or takes nothing."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Timer

import pytest

from tests.unit.transfer.layouts import layout
from tests.unit.transfer.ranks import PATIENCE_S, SECRET, group
from workers.transfer.link import Endpoint, PeerLink
from workers.transfer.messages import (
    MAX_READ_BLOCKS,
    NONCE_BYTES,
    Challenge,
    Check,
    Hello,
    Message,
    PeerFacts,
    Welcome,
    encode,
    frame_reader,
    transfer_key,
    welcome_mac,
)
from workers.transfer.transport import Reason, TransferFailed

TIMEOUT_S = 0.3


@contextmanager
def signals_until(reset: Callable[[], None]) -> Iterator[None]:
    """A hundred a second. `reset` is called after three seconds, or a wait that is too long never ends."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    end = Timer(3, reset)
    end.start()
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        end.cancel()


def test_signals_do_not_prolong_a_wait() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as silent,
        signals_until(lambda: silent.shutdown(socket.SHUT_RDWR)),
        pytest.raises(TransferFailed) as caught,
    ):
        PeerLink(Endpoint(*silent.getsockname()), SECRET, timeout_s=TIMEOUT_S)
    assert caught.value.reason is Reason.TIMEOUT


def test_signals_do_not_prolong_what_nobody_takes() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, ThreadPoolExecutor(1) as threads:
        welcomed = threads.submit(_welcome, listener, _facts())
        link = PeerLink(Endpoint(*listener.getsockname()), SECRET, timeout_s=TIMEOUT_S)
        deaf = welcomed.result(PATIENCE_S)
    request = Check(number=1, blocks=(1 << 30,) * MAX_READ_BLOCKS)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset
    with closing(link), closing(deaf), signals_until(deaf.close), pytest.raises(TransferFailed) as caught:
        for _ in range((64 << 20) // len(encode(request))):  # more than the system keeps
            link.send(request)
    assert caught.value.reason is Reason.TIMEOUT


def _facts() -> PeerFacts:
    with group(layout()) as [rank]:
        link = PeerLink(rank.agent.endpoint, SECRET, timeout_s=PATIENCE_S)
        link.close()
        return link.facts


def _welcome(listener: socket.socket, facts: PeerFacts) -> socket.socket:
    """Greets a reader, and is to read nothing more."""
    connection, _ = listener.accept()
    nonce, frames = bytes(NONCE_BYTES), frame_reader()
    connection.sendall(encode(Challenge(nonce=nonce)))
    hellos: list[Message] = []
    while not hellos:
        hellos += frames.feed(connection.recv(1 << 10))
    assert isinstance(hellos[0], Hello)
    mac = welcome_mac(transfer_key(SECRET), nonce, hellos[0].nonce, facts)
    connection.sendall(encode(Welcome(mac=mac, facts=facts)))
    return connection
