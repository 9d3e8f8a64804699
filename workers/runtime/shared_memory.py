"""How the ranks of one machine come to share memory for their collectives.

Rank 0 makes memory without a name (a memfd: nothing to clean up, whoever dies when) and tells the others,
over their authenticated links, where it is: /proc/<pid>/fd/<fd> of its process, which its own user alone may
open. They check size and label, map it, and say so; then all use it. If one cannot, none does, and the ranks
go on with gloo. Two agreements:

    rank 0: path and label, or its problem; others: nothing, or their problem  -> the offer
    others: nothing, or why they could not open it                             -> whether it is used
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.engine.step import GroupFailed
from workers.kernels import KernelsUnavailable, Library, SharedCollective, load_library, memory_bytes
from workers.runtime.handshake import Facts

_LABEL_BYTES = 32
_PROBLEM = "problem"  # empty: none
_log = logging.getLogger(__name__)

Decide = Callable[[dict[int, Facts]], Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank among those that share."""

    rank: int
    size: int
    timeout_s: float  # of every collective


def lead(
    place: Place,
    num_here: int,
    agree: Callable[[Facts, Decide], Facts],
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
        fd, label = _create(_whole_bytes(library, place.size))
        offer = {"path": f"/proc/{os.getpid()}/fd/{fd}", "label": label.hex()}
        collective = _attach(library, fd, label, place)
    except (KernelsUnavailable, OSError) as error:
        problem = str(error)
    try:
        verdict = agree({**offer, _PROBLEM: problem}, _first_problem)
        if not verdict[_PROBLEM]:
            verdict = agree({_PROBLEM: ""}, _first_problem)
    finally:
        if fd >= 0:
            os.close(fd)
    if collective is None or verdict[_PROBLEM]:
        _log.warning("the ranks add up over loopback sockets, not in shared memory: %s", verdict[_PROBLEM])
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
    offer = agree({_PROBLEM: problem})
    if offer[_PROBLEM]:
        return None
    collective = None
    try:
        collective = _open(library, str(offer["path"]), bytes.fromhex(str(offer["label"])), place)
    except OSError as error:
        problem = str(error)
    if agree({_PROBLEM: problem})[_PROBLEM] or collective is None:
        return None
    return _proven(collective, place)


def _first_problem(by_rank: dict[int, Facts]) -> Facts:
    """Rank 0's facts, with the problem of the first rank that has one."""
    for rank, facts in by_rank.items():
        if facts[_PROBLEM]:
            return {_PROBLEM: f"rank {rank}: {facts[_PROBLEM]}"}
    return by_rank[0]


def _whole_bytes(library: Library, size: int) -> int:
    return memory_bytes(library, size) + _LABEL_BYTES


def _create(num_bytes: int) -> tuple[int, bytes]:
    """Memory of zeros with a random label at its end; its size is fixed, so that no access can fault."""
    fd = os.memfd_create("tandem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        label = secrets.token_bytes(_LABEL_BYTES)
        os.pwrite(fd, label, num_bytes - _LABEL_BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd, label


def _open(library: Library, path: str, label: bytes, place: Place) -> SharedCollective:
    """Raises OSError also for what is not the leader's memory, as where the pid means another process."""
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        raise OSError(f"{path[:80]!r} is no memory of a process")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _attach(library, fd, label, place)
    finally:
        os.close(fd)


def _attach(library: Library, fd: int, label: bytes, place: Place) -> SharedCollective:
    """Maps the memory for good; the descriptor may be closed after."""
    found, expected = os.fstat(fd), _whole_bytes(library, place.size)
    if not stat.S_ISREG(found.st_mode) or found.st_size != expected:
        raise OSError(f"the memory of rank 0 has {found.st_size} bytes, expected are {expected}")
    memory = mmap.mmap(fd, expected, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    if memory[-_LABEL_BYTES:] != label:
        raise OSError("the memory that was found is not that of rank 0")
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
