"""The reader's connection alone, with an owner that says nothing, or takes nothing."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Timer

import pytest

from tests.unit.transfer.layouts import layout
from tests.unit.transfer.ranks import PATIENCE_S, SECRET, group
from workers.transfer.link import Endpoint, PeerLink
from workers.transfer.messages import (
    MAX_READ_BLOCKS,
    Challenge,
    Check,
    Hello,
    PeerFacts,
    Welcome,
    encode,
    frame_reader,
    transfer_key,
    welcome_mac,
)
from workers.transfer.transport import Reason, TransferFailed

TIMEOUT_S = 1.0


@contextmanager
def signals_for(connection: socket.socket) -> Iterator[None]:
    """A hundred a second. The connection ends after three seconds, or a wait that is too long never does."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    end = Timer(3, connection.shutdown, [socket.SHUT_RDWR])
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
        signals_for(silent),
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
    with closing(link), closing(deaf), signals_for(deaf), pytest.raises(TransferFailed) as caught:
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
    nonce, hellos, frames = bytes(32), [], frame_reader()
    connection.sendall(encode(Challenge(nonce=nonce)))
    while not hellos:
        hellos = [*frames.feed(connection.recv(1 << 10))]
    assert isinstance(hellos[0], Hello)
    mac = welcome_mac(transfer_key(SECRET), nonce, hellos[0].nonce, facts)
    connection.sendall(encode(Welcome(mac=mac, facts=facts)))
    return connection
