"""Which transport two ranks use: the first of the reader's list that works between them.

The list is in order of speed: `memory` copies once, `sockets` twice and through the kernel's buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from workers.transfer.cross_memory import MEMORY, CrossMemoryReader
from workers.transfer.link import PeerLink
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.sockets import SOCKETS, SocketReader
from workers.transfer.transport import Reader, Reason, TransferFailed

TRANSPORTS: Final = (MEMORY, SOCKETS)

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What was chosen, and why nothing before it was."""

    reader: Reader
    reason: str


def choose(link: PeerLink, pool: PoolBytes, machine: str, transports: Sequence[str]) -> Choice:
    """A reader over this link. Raises TransferFailed (UNSUPPORTED) with every reason when nothing works."""
    passed_over: list[str] = []
    for name in transports:
        if name not in link.facts.transports:
            passed_over.append(f"{name}: the owner does not offer it")
            continue
        try:
            reader = _reader(name, link, pool, machine)
        except TransferFailed as error:
            if error.reason is not Reason.UNSUPPORTED:
                raise
            passed_over.append(f"{name}: {error}")
            continue
        reason = "; ".join(["the fastest that works", *passed_over])
        _log.info("KV blocks of %s come by %s (%s)", link.endpoint, name, reason)
        return Choice(reader, reason)
    raise TransferFailed(
        Reason.UNSUPPORTED, f"no transport works between {link.endpoint} and here: {'; '.join(passed_over)}"
    )


def _reader(name: str, link: PeerLink, pool: PoolBytes, machine: str) -> Reader:
    if name == MEMORY:
        return CrossMemoryReader(link, pool, machine)
    assert name == SOCKETS, name
    return SocketReader(link, pool)
