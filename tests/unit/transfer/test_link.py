"""The reader's connection alone, with an owner that says nothing."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from threading import Timer

import pytest

from workers.transfer.link import Endpoint, PeerLink
from workers.transfer.transport import Reason, TransferFailed


def test_signals_do_not_prolong_a_wait() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        end = Timer(3, silent.shutdown, [socket.SHUT_RDWR])  # else a wait that is too long never ends
        end.start()
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            with pytest.raises(TransferFailed) as caught:
                PeerLink(Endpoint(*silent.getsockname()), b"secret", timeout_s=0.3)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            end.cancel()
    assert caught.value.reason is Reason.TIMEOUT
