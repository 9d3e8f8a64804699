"""Blocks between processes of one machine: process_vm_readv(2) copies from the owner's pool into ours.

One copy, no staging, no work for the owner, not even while it is stopped. The pool stays in private huge
pages. Where the owner's memory lies comes over the greeted connection; that it is the memory of that very
process is proven by random bytes which every call reads along: a number of a process means another one in
another container, and can be given to another one after its end.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from workers.transfer.layout import Piece
from workers.transfer.link import PeerLink
from workers.transfer.messages import PROOF_BYTES
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.transport import BlockRead, Reason, TransferFailed

MEMORY: Final = "memory"
_MAX_RUNS: Final = 1024  # of one call, by the system (IOV_MAX)
_CALL_BYTES: Final = 64 << 20  # of one call, so that a cancelled read ends soon
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)

Runs = NDArray[np.uint64]  # (n, 2): address, bytes; laid out as an array of struct iovec


class Proof:
    """Random bytes in this process's memory, by which a reader knows it."""

    def __init__(self) -> None:
        self.value = os.urandom(PROOF_BYTES)
        self._memory = ctypes.create_string_buffer(self.value, PROOF_BYTES)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._memory)

    def revoke(self) -> None:
        """From now on no reader takes what it reads for valid: before the pool is given up."""
        ctypes.memset(self._memory, 0, PROOF_BYTES)


def allow_readers() -> None:
    """Lets processes of the same user read this one's memory where Yama restricts it to descendants.

    With ptrace_scope 0 they may anyway; with 2 or 3 only an administrator can allow it.
    """
    if _YAMA.exists() and _YAMA.read_text().strip() == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


class CrossMemoryReader:
    """See `transport.Reader`."""

    name = MEMORY

    def __init__(self, link: PeerLink, pool: PoolBytes, machine: str) -> None:
        """machine: of this process, as in MemoryFacts. Raises TransferFailed (UNSUPPORTED) saying why."""
        facts = link.facts.memory
        if facts is None or not pool.is_host_memory:
            raise _unsupported(link, "a pool is not in host memory")
        if facts.machine != machine:
            raise _unsupported(link, "the owner is on another machine")
        self._link = link
        self._pool = pool
        self._facts = facts
        self._block_bytes = link.facts.layout.block_bytes(link.facts.rank)
        self._proof = np.zeros(PROOF_BYTES, dtype=np.uint8)
        self._table = np.zeros(link.facts.num_blocks if facts.generations_address else 0, dtype=np.int64)
        self._local = np.zeros((_MAX_RUNS, 2), dtype=np.uint64)
        self._remote = np.zeros((_MAX_RUNS, 2), dtype=np.uint64)
        self._read_memory = _bind()
        try:
            self._copy(0)
        except TransferFailed as error:
            raise _unsupported(link, str(error)) from error

    def read(self, blocks: Sequence[BlockRead], pieces: Sequence[Piece]) -> None:
        """Every call reads bytes, then the generations, then the proof: the system goes in this order."""
        sources, owns, wanted = self._columns(blocks)
        self._check_places(owns, pieces)
        for piece in pieces:
            remote = self._facts.pool_address + sources * self._block_bytes + piece.peer_offset
            local = self._pool.address + owns * self._pool.block_bytes + piece.own_offset
            for run in range(0, piece.num_bytes, _CALL_BYTES):
                num_bytes = min(_CALL_BYTES, piece.num_bytes - run)
                step = max(1, min(_MAX_RUNS - 2, _CALL_BYTES // num_bytes))
                for start in range(0, len(blocks), step):
                    part = slice(start, start + step)
                    count = len(sources[part])
                    self._local[:count, 0] = local[part] + run
                    self._remote[:count, 0] = remote[part] + run
                    self._local[:count, 1] = self._remote[:count, 1] = num_bytes
                    self._copy_checked(count, sources[part], wanted[part])

    def check(self, blocks: Sequence[BlockRead]) -> None:
        """Reads the table from the first to the last of these blocks."""
        if not self._facts.generations_address:
            raise TransferFailed(Reason.REFUSED, f"{self._link.endpoint} keeps no generations: ask rank 0")
        sources, _, wanted = self._columns(blocks)
        self._copy_checked(0, sources, wanted)

    def cancel(self) -> None:
        self._link.cancel()

    def close(self) -> None:
        self._link.close()

    def _columns(
        self, blocks: Sequence[BlockRead]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sources, own blocks, generations. Sources become addresses: none is outside the owner's pool."""
        table = np.array(blocks, dtype=np.int64)  # (blocks, 3)
        sources, num_blocks = table[:, 0], self._link.facts.num_blocks
        if sources.min() < 0 or sources.max() >= num_blocks:
            raise TransferFailed(
                Reason.REFUSED,
                f"blocks {sources.min()} to {sources.max()} of {self._link.endpoint}, which has {num_blocks}",
            )
        return sources, table[:, 2], table[:, 1]

    def _check_places(self, owns: NDArray[np.int64], pieces: Sequence[Piece]) -> None:
        """Nor outside the own pool."""
        for piece in pieces:
            for block in (int(owns.min()), int(owns.max())):
                if not self._pool.has(block, piece.own_offset, piece.num_bytes):
                    raise ValueError(f"own block {block}, {piece} is outside the pool")
            if piece.peer_offset + piece.num_bytes > self._block_bytes:
                raise ValueError(f"{piece} is outside a block of {self._block_bytes} bytes")

    def _copy_checked(self, count: int, sources: NDArray[np.int64], wanted: NDArray[np.int64]) -> None:
        """The first runs, and the generations of these blocks where the owner keeps them."""
        address = self._facts.generations_address
        if not address:
            self._copy(count)
            return
        first, last = int(sources.min()), int(sources.max())
        self._local[count] = self._table.ctypes.data + 8 * first, 8 * (last + 1 - first)
        self._remote[count] = address + 8 * first, 8 * (last + 1 - first)
        self._copy(count + 1)
        if not np.array_equal(self._table[sources], wanted):
            raise TransferFailed(
                Reason.STALE, f"a block of {self._link.endpoint} belongs to somebody else by now"
            )

    def _copy(self, count: int) -> None:
        """The first runs and the proof behind them, by one call, or by several where the system stops."""
        self._proof[:] = 0
        self._local[count] = self._proof.ctypes.data, PROOF_BYTES
        self._remote[count] = self._facts.proof_address, PROOF_BYTES
        local, remote = self._local[: count + 1], self._remote[: count + 1]
        left = int(remote[:, 1].sum())
        while True:
            self._link.raise_if_cancelled()
            got = self._read_memory(
                self._facts.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
            )
            if got <= 0:
                raise self._failed(ctypes.get_errno() if got < 0 else errno.EFAULT)
            left -= got
            if left == 0:
                break
            local, remote = _behind(local, got), _behind(remote, got)
        if self._proof.tobytes() != self._facts.proof:
            raise TransferFailed(
                Reason.UNREACHABLE,
                f"process {self._facts.pid} is not the owner {self._link.endpoint}: it ended, or its number "
                "means another process here",
            )

    def _failed(self, code: int) -> TransferFailed:
        facts = self._facts
        if code == errno.ESRCH:
            return TransferFailed(Reason.UNREACHABLE, f"process {facts.pid} of {self._link.endpoint} ended")
        if code == errno.EFAULT:
            return TransferFailed(
                Reason.UNREACHABLE,
                f"process {facts.pid} of {self._link.endpoint} has no such memory any more",
            )
        if code == errno.EPERM:
            scope = _YAMA.read_text().strip() if _YAMA.exists() else "none"
            return TransferFailed(
                Reason.UNSUPPORTED,
                f"the system does not permit reading the memory of process {facts.pid} (EPERM): both "
                f"processes must run as one user, kernel.yama.ptrace_scope (now {scope}) must be 0 or 1, and "
                "a container's seccomp profile must allow process_vm_readv",
            )
        return TransferFailed(
            Reason.UNSUPPORTED, f"process_vm_readv of process {facts.pid}: {os.strerror(code)}"
        )


def _behind(runs: Runs, num_bytes: int) -> Runs:
    """What is left of the runs after their first bytes."""
    ends = np.cumsum(runs[:, 1])
    done = int(np.searchsorted(ends, num_bytes, side="right"))
    left = runs[done:].copy()
    begun = num_bytes - (int(ends[done - 1]) if done else 0)
    left[0] += np.array([begun, -begun], dtype=np.int64).astype(np.uint64)
    return left


def _bind() -> Callable[[int, int, int, int, int, int], int]:
    """The system call, of: pid, runs here, how many, runs there, how many, 0.

    ctypes lets other threads run meanwhile.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise TransferFailed(Reason.UNSUPPORTED, "this system has no process_vm_readv") from error
    pointer, size = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes, call.restype = [ctypes.c_int, pointer, size, pointer, size, size], ctypes.c_ssize_t
    return cast(Callable[[int, int, int, int, int, int], int], call)


def _unsupported(link: PeerLink, why: str) -> TransferFailed:
    return TransferFailed(Reason.UNSUPPORTED, f"memory of {link.endpoint}: {why}")
