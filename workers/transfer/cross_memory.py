"""Blocks between processes of one machine: process_vm_readv(2) copies from the owner's pool into ours.

One copy, no staging, no work for the owner, not even while it is stopped. Nothing is mapped for it: the pool
may lie in memory of its process alone, or in what the ranks of its group share. Where the owner's memory lies
comes over the greeted connection; that it is the memory of that very process is proven by random bytes which
every call reads along: a number of a process means another one in another container, and can be given to
another one after its end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

from workers.transfer.layout import Piece
from workers.transfer.link import PeerLink
from workers.transfer.messages import PROOF_BYTES
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.transport import Reason, TransferFailed
from workers.types import BlockRead

MEMORY: Final = "memory"
_MAX_RUNS: Final = 1024  # of one call, by the system (IOV_MAX)
_CALL_BLOCKS: Final = (_MAX_RUNS - 1) // 2  # a run for the bytes, one for the generation; one for the proof
_CALL_BYTES: Final = 64 << 20  # of one call, so that a cancelled read ends soon
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)


class _Run(NamedTuple):
    """Bytes to copy from one address to another."""

    here: int
    there: int
    num_bytes: int


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
        self._own_bytes = pool.block_bytes
        self._peer_bytes = link.facts.layout.block_bytes(link.facts.rank)
        self._proof = (ctypes.c_char * PROOF_BYTES)()
        self._generations = array("q", bytes(8 * _MAX_RUNS))  # of the blocks of one call
        self._runs_here, self._runs_there = (array("Q", bytes(16 * _MAX_RUNS)) for _ in range(2))
        self._read_memory = _bind()
        try:
            self._copy([])
        except TransferFailed as error:
            raise _unsupported(link, str(error)) from error

    def read(self, blocks: Sequence[BlockRead], pieces: Sequence[Piece]) -> None:
        """Every call reads bytes, then the generations, then the proof: the system goes in this order."""
        self._check_places(blocks, pieces)
        for peer_rank, peer_offset, own_offset, piece_bytes in pieces:
            assert peer_rank == self._link.facts.rank
            for start in range(0, piece_bytes, _CALL_BYTES):
                num_bytes = min(_CALL_BYTES, piece_bytes - start)
                there = self._facts.pool_address + peer_offset + start
                here = self._pool.address + own_offset + start
                step = max(1, min(_CALL_BLOCKS, _CALL_BYTES // num_bytes))
                for first in range(0, len(blocks), step):
                    part = blocks[first : first + step]
                    runs = [
                        _Run(here + own * self._own_bytes, there + source * self._peer_bytes, num_bytes)
                        for source, _, own in part
                    ]
                    self._copy_checked(runs, part)

    def check(self, blocks: Sequence[BlockRead]) -> None:
        """Reads the entries of these blocks in the owner's table."""
        if not self._facts.generations_address:
            raise TransferFailed(Reason.REFUSED, f"{self._link.endpoint} keeps no generations: ask rank 0")
        self._check_places(blocks, ())
        for first in range(0, len(blocks), _CALL_BLOCKS):
            self._copy_checked([], blocks[first : first + _CALL_BLOCKS])

    def cancel(self) -> None:
        self._link.cancel()

    def close(self) -> None:
        self._link.close()

    def _check_places(self, blocks: Sequence[BlockRead], pieces: Sequence[Piece]) -> None:
        """Numbers become addresses: none may be outside either pool."""
        num_blocks = self._link.facts.num_blocks
        for source, _, own in blocks:
            if not 0 <= source < num_blocks:
                raise TransferFailed(
                    Reason.REFUSED, f"block {source} of {self._link.endpoint}, which has {num_blocks}"
                )
            if not 0 <= own < self._pool.num_blocks:
                raise ValueError(f"own block {own} of a pool of {self._pool.num_blocks}")
        for piece in pieces:
            if (
                min(piece.peer_offset, piece.own_offset, piece.num_bytes) < 0
                or piece.peer_offset + piece.num_bytes > self._peer_bytes
                or piece.own_offset + piece.num_bytes > self._own_bytes
            ):
                raise ValueError(
                    f"{piece} is outside blocks of {self._peer_bytes} and {self._own_bytes} bytes"
                )

    def _copy_checked(self, runs: list[_Run], blocks: Sequence[BlockRead]) -> None:
        """The runs, and the generations of these blocks where the owner keeps them."""
        address = self._facts.generations_address
        if not address:
            self._copy(runs)
            return
        own = self._generations.buffer_info()[0]
        for index, block in enumerate(blocks):
            runs.append(_Run(own + 8 * index, address + 8 * block.source, 8))
        self._copy(runs)
        for block, generation in zip(blocks, self._generations, strict=False):
            if block.generation != generation:
                raise TransferFailed(
                    Reason.STALE,
                    f"block {block.source} of {self._link.endpoint} belongs to somebody else by now",
                )

    def _copy(self, runs: list[_Run]) -> None:
        """The runs and the proof behind them, by one call, or by several where the system stops."""
        ctypes.memset(self._proof, 0, PROOF_BYTES)
        proof = _Run(ctypes.addressof(self._proof), self._facts.proof_address, PROOF_BYTES)
        left = [*runs, proof]
        while left:
            self._link.raise_if_cancelled()
            left = _behind(left, self._call(left))
        if self._proof.raw != self._facts.proof:
            raise TransferFailed(
                Reason.UNREACHABLE,
                f"process {self._facts.pid} is not the owner {self._link.endpoint}: it ended, or its number "
                "means another process here",
            )

    def _call(self, runs: list[_Run]) -> int:
        """Bytes that were copied, at least one."""
        form = f"={2 * len(runs)}Q"
        struct.pack_into(form, self._runs_here, 0, *(x for run in runs for x in (run.here, run.num_bytes)))
        struct.pack_into(form, self._runs_there, 0, *(x for run in runs for x in (run.there, run.num_bytes)))
        here, there = self._runs_here.buffer_info()[0], self._runs_there.buffer_info()[0]
        got = self._read_memory(self._facts.pid, here, len(runs), there, len(runs), 0)
        if got <= 0:
            raise self._failed(ctypes.get_errno() if got < 0 else errno.EFAULT)
        return got

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


def _behind(runs: list[_Run], num_bytes: int) -> list[_Run]:
    """What is left of the runs after their first bytes."""
    for index, run in enumerate(runs):
        if num_bytes < run.num_bytes:
            begun = _Run(run.here + num_bytes, run.there + num_bytes, run.num_bytes - num_bytes)
            return [begun, *runs[index + 1 :]]
        num_bytes -= run.num_bytes
    return []


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
