"""How the ranks of one machine come to share memory for their collectives.

Rank 0 makes memory (`workers.runtime.memfd`) and tells the others, over their authenticated links, where it
is. They check size and label, map it, and say so; then all use it. If one cannot, none does, and the ranks go
on with gloo. Two agreements:

    rank 0: path and label, or its problem; others: nothing, or their problem  -> the offer
    others: nothing, or why they could not open it                             -> whether it is used
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.engine.step import GroupFailed
from workers.kernels import KernelsUnavailable, Library, SharedCollective, load_library, memory_bytes
from workers.runtime import memfd
from workers.runtime.agreement import PROBLEM, Agree, first_problem
from workers.runtime.handshake import Facts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank among those that share."""

    rank: int
    size: int
    timeout_s: float  # of every collective


def lead(
    place: Place,
    num_here: int,
    agree: Agree,
    load: Callable[[], Library] = load_library,
) -> SharedCollective | None:
    """Rank 0's side; None, with one line in the log, where gloo has to do.

    num_here: ranks on this machine. agree: of the link to the others. Raises GroupFailed when one dies.
    """
    if num_here < place.size:
        _log.warning("the ranks are on several machines: they add up over the network")
        return None
    collective, problem, fd = None, "", -1
    offer: Facts = {}
    try:
        library = load()
        fd = memfd.create("tandem", _whole_bytes(library, place.size))
        offer = {"path": memfd.path_of(fd), "label": memfd.seal(fd).hex()}
        collective = _attach(library, fd, place)
    except (KernelsUnavailable, OSError) as error:
        problem = str(error)
    try:
        verdict = agree({**offer, PROBLEM: problem}, first_problem)
        if not verdict[PROBLEM]:
            verdict = agree({PROBLEM: ""}, first_problem)
    finally:
        if fd >= 0:
            os.close(fd)
    if collective is None or verdict[PROBLEM]:
        _log.warning("the ranks add up over loopback sockets, not in shared memory: %s", verdict[PROBLEM])
        return None
    return _proven(collective, place)


def follow(
    place: Place,
    num_here: int,
    agree: Callable[[Facts], Facts],
    load: Callable[[], Library] = load_library,
) -> SharedCollective | None:
    """The side of the other ranks, at the same time. Raises GroupFailed, or what `agree` raises."""
    if num_here < place.size:
        return None
    problem = ""
    try:
        library = load()
    except KernelsUnavailable as error:
        problem = str(error)
    offer = agree({PROBLEM: problem})
    if offer[PROBLEM]:
        return None
    collective = None
    try:
        label, num_bytes = bytes.fromhex(str(offer["label"])), _whole_bytes(library, place.size)
        with memfd.opened(str(offer["path"]), label, num_bytes, 0) as fd:
            collective = _attach(library, fd, place)
    except OSError as error:
        problem = str(error)
    if agree({PROBLEM: problem})[PROBLEM] or collective is None:
        return None
    return _proven(collective, place)


def _whole_bytes(library: Library, size: int) -> int:
    return memory_bytes(library, size) + memfd.LABEL_BYTES


def _attach(library: Library, fd: int, place: Place) -> SharedCollective:
    """Maps the memory for good; the descriptor may be closed after."""
    memory = mmap.mmap(fd, _whole_bytes(library, place.size), mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return SharedCollective(library, memory, rank=place.rank, size=place.size, timeout_s=place.timeout_s)


def _proven(collective: SharedCollective, place: Place) -> SharedCollective:
    """After a first sum that came out right."""
    total = torch.full((1,), float(place.rank))
    try:
        collective.all_reduce(total)
    except RuntimeError as error:
        raise GroupFailed(f"rank {place.rank} cannot share memory with its group: {error}") from error
    if int(total.item()) != place.size * (place.size - 1) // 2:
        raise GroupFailed(f"rank {place.rank}: the first sum in shared memory gave {total.item()}")
    return collective
