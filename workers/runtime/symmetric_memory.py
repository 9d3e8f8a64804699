"""How the ranks of one machine come to add up in symmetric memory (`workers.kernels.symmetric`).

Each rank does the same, and all use it or none. Then NCCL adds up, and a line in the log says why. Three
agreements:

    which GPU it has, which ones it reaches, or its problem   -> whether all reach all
    nothing, or why it could not allocate                     -> whether all have
    what came of first sums, or its problem                   -> whether the bits of all are the same

They are not left out where the config or several machines forbid it: the ranks must not differ in what they
agree on. A rank that alone fails to map the memory or to make a sum leaves the others waiting for it: the
limit of the start ends the group then. Memory is taken before the KV pool is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
import torch.distributed as dist

from workers.kernels import PeerMemory, SymmetricCollective
from workers.runtime.agreement import PROBLEM, Agree, first_problem
from workers.runtime.handshake import Facts

_MIN_BUFFER_BYTES = 8 << 20  # of three ranks or more prompts go through it in pieces
_UNIT_BYTES = 2 << 20  # in which a device has such memory
_PERIOD = 1003  # numbers of the first sums: no multiple of what a thread takes
_TOLERANCES = {torch.bfloat16: 2.0**-5, torch.float32: 2.0**-20}  # a rank; of numbers of about 1
_GPU, _REACHED, _BITS = "gpu", "reached", "bits"
_log = logging.getLogger(__name__)


class Peers(Protocol):
    """The GPUs that a process sees: `workers.runtime.peer_memory.TorchPeers`, and doubles in tests."""

    @property
    def name(self) -> str:
        """Of this rank's own, for all ranks; without blanks. Raises RuntimeError."""
        ...

    def reachable(self) -> list[str]:
        """Names of the others that share memory with it. Raises RuntimeError."""
        ...

    def allocate(self, num_bytes: int) -> PeerMemory:
        """Raises RuntimeError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank among those that add up."""

    rank: int
    size: int
    message_bytes: int  # the longest of a decode step
    objection: str  # why symmetric memory must not be used; empty: it may


def settle(
    place: Place, peers: Peers, agree: Agree, nccl: Callable[[torch.Tensor], object] = dist.all_reduce
) -> SymmetricCollective | None:
    """None, with one line in rank 0's log, where NCCL has to do. Raises GroupFailed, or what `agree` raises.

    nccl: of the group, in place. The first sums have no timeout: a watchdog has to be there.
    """
    problem, name, reached, bits = place.objection, "", "", ""
    if not problem:
        try:
            name, reached = peers.name, " ".join(peers.reachable())
        except RuntimeError as error:
            problem = str(error)
    verdict = agree({PROBLEM: problem, _GPU: name, _REACHED: reached}, _all_reach_all)
    collective = None
    if not verdict[PROBLEM]:
        try:
            memory = peers.allocate(buffer_bytes(place.message_bytes))
        except RuntimeError as error:
            problem = str(error)
        verdict = agree({PROBLEM: problem}, first_problem)
    if not verdict[PROBLEM]:
        try:
            memory.meet()
            collective = SymmetricCollective(memory, place.size)
            bits = _first_sums(collective, place, memory.buffer, nccl)
        except RuntimeError as error:
            problem = str(error)
        verdict = agree({PROBLEM: problem, _BITS: bits}, _all_have_the_same)
    if not verdict[PROBLEM]:
        return collective
    if place.rank == 0:
        _log.warning("the ranks add up by NCCL, not in symmetric memory: %s", verdict[PROBLEM])
    return None


def buffer_bytes(message_bytes: int) -> int:
    """For the longest message of a decode step."""
    return -(-max(message_bytes, _MIN_BUFFER_BYTES) // _UNIT_BYTES) * _UNIT_BYTES


def _all_reach_all(by_rank: dict[int, Facts]) -> Facts:
    if (verdict := first_problem(by_rank))[PROBLEM]:
        return verdict
    for rank, facts in by_rank.items():
        reached = str(facts[_REACHED]).split()
        for other, its in by_rank.items():
            if other != rank and its[_GPU] not in reached:
                problem = f"rank {rank} does not see the GPU of rank {other}, or has no NVLink to it"
                return {PROBLEM: problem}
    return {PROBLEM: ""}


def _all_have_the_same(by_rank: dict[int, Facts]) -> Facts:
    if (verdict := first_problem(by_rank))[PROBLEM]:
        return verdict
    is_same = len({facts[_BITS] for facts in by_rank.values()}) == 1
    return {PROBLEM: "" if is_same else "the ranks found different first sums"}


def _first_sums(
    collective: SymmetricCollective,
    place: Place,
    buffer: torch.Tensor,
    nccl: Callable[[torch.Tensor], object],
) -> str:
    """A digest of their bits. All ranks make all sums, whatever they find. Raises RuntimeError when one is
    wrong, or when bits depend on the length of a message or the place in it."""
    digest, problem = blake2b(digest_size=16), ""
    for dtype, tolerance in _TOLERANCES.items():
        generator = torch.Generator().manual_seed(1)
        every = torch.randn(place.size, _PERIOD, generator=generator).to(dtype)  # of all ranks
        own = every[place.rank].to(buffer.device)
        short, long = own.clone(), own.repeat(buffer.nbytes // own.nbytes + 1)  # one shot; pieces, in two
        by_nccl = (short.clone(), long.clone()) if place.size == 2 else ()
        for message in (short, long):
            collective.all_reduce(message)
        for message in by_nccl:
            nccl(message)
        found = short.cpu()
        wanted = every.double().sum(0)
        if not bool(((found.double() - wanted).abs() <= place.size * tolerance * (1 + wanted.abs())).all()):
            problem = problem or f"a first sum of {dtype} is wrong"
        if not torch.equal(long.view(-1, _PERIOD), short.expand(len(long) // _PERIOD, -1)):
            problem = problem or f"a sum of {dtype} depends on the length of the message or the place in it"
        if by_nccl and not (torch.equal(short, by_nccl[0]) and torch.equal(long, by_nccl[1])):
            problem = problem or f"NCCL finds another sum of {dtype} of two ranks"
        digest.update(found.view(torch.uint8).numpy().tobytes())
    if problem:
        raise RuntimeError(problem)
    return digest.hexdigest()
