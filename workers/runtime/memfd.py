"""Memory without a name that a rank hands to others of its machine: nothing to clean up, whoever dies when.

    owner: create -> (maps it) -> seal -> tells path and label over the authenticated links
    others: opened(path, label, size) -> (map it)
    all: close their descriptors; the memory lives as long as it is mapped

The path is /proc/<pid>/fd/<fd> of the owner's process, which its own user alone may open. The label, random
bytes at the end, tells apart what else may be found there, as where the pid means another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator

LABEL_BYTES = 32
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create(name: str, num_bytes: int) -> int:
    """A descriptor of so many zeros, none of which takes memory yet. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> bytes:
    """Takes all of the memory, fixes its size, so that no access can fault, and puts a label at its end."""
    num_bytes = os.fstat(fd).st_size
    os.posix_fallocate(fd, 0, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED | fcntl.F_SEAL_SEAL)
    label = secrets.token_bytes(LABEL_BYTES)
    os.pwrite(fd, label, num_bytes - LABEL_BYTES)
    return label


def path_of(fd: int) -> str:
    """By which other processes of this user open it, while this one has it open."""
    return f"/proc/{os.getpid()}/fd/{fd}"


@contextlib.contextmanager
def opened(path: str, label: bytes, num_bytes: int, owner: int) -> Iterator[int]:
    """A descriptor of the memory of rank `owner`. Raises OSError also for what is not that."""
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        raise OSError(f"{path[:80]!r} is no memory of a process")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(fd, label, num_bytes, owner)
        yield fd
    finally:
        os.close(fd)


def _check(fd: int, label: bytes, num_bytes: int, owner: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
        raise OSError(f"the memory of rank {owner} has {found.st_size} bytes, expected are {num_bytes}")
    if os.pread(fd, LABEL_BYTES, num_bytes - LABEL_BYTES) != label:
        raise OSError(f"the memory that was found is not that of rank {owner}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED != _FIXED:
        raise OSError(f"the memory of rank {owner} could change its size")
