"""Which transport two ranks use: the first of the reader's list that works between them.

The list is in order of speed: `memory` copies once, but needs one machine and host memory; `process_group`
moves from GPU to GPU, and between host pools is slower than `sockets`, so there it is used only where sockets
are left out of the list.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from workers.transfer.cross_memory import MEMORY, CrossMemoryReader
from workers.transfer.link import PeerLink
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.process_group import PROCESS_GROUP, PairReader
from workers.transfer.sockets import SOCKETS, SocketReader
from workers.transfer.transport import Reader, Reason, TransferFailed

TRANSPORTS: Final = (MEMORY, PROCESS_GROUP, SOCKETS)

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What was chosen, and why nothing before it was."""

    reader: Reader
    reason: str


def choose(
    link: PeerLink, pool: PoolBytes, machine: str, transports: Sequence[str], *, timeout_s: float
) -> Choice:
    """A reader over this link; timeout_s: of its waits.

    Raises TransferFailed (UNSUPPORTED) with every reason when nothing works.
    """
    passed_over: list[str] = []
    for name in transports:
        if name not in link.facts.transports:
            passed_over.append(f"{name}: the owner does not offer it")
            continue
        if name == PROCESS_GROUP and pool.is_host_memory and SOCKETS in transports:
            passed_over.append(f"{name}: sockets are faster between host pools")
            continue
        try:
            reader = _reader(name, link, pool, machine, timeout_s)
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


def _reader(name: str, link: PeerLink, pool: PoolBytes, machine: str, timeout_s: float) -> Reader:
    if name == MEMORY:
        return CrossMemoryReader(link, pool, machine)
    if name == PROCESS_GROUP:
        if link.facts.device != pool.blocks.device.type:
            raise TransferFailed(
                Reason.UNSUPPORTED,
                f"the owner's pool is on {link.facts.device}, ours on {pool.blocks.device.type}",
            )
        return PairReader(link, pool, timeout_s)
    assert name == SOCKETS, name
    return SocketReader(link, pool)
