"""How the ranks of one machine come to see each other's KV pools, to share their attention, and the logits.

Every rank makes memory (`workers.runtime.memfd`) for its own pool and for the rows of a step, tells the
others where it is, and maps theirs. If one cannot, none does, and every pool lies in memory of its rank
alone. Two agreements:

    every rank: path and label of its memory, and what it takes all to hold and compute by, or its problem
                                                              -> paths and labels of all
    every rank: nothing, or why it could not open another's   -> whether they are used

    | blocks | work | draws | ids | logits | ... | label |     from a huge page to the end of one
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from workers.kernels import (
    Draw,
    KernelsUnavailable,
    Library,
    LogitsPart,
    RankPart,
    load_library,
    shared_bytes,
)
from workers.kernels.memory import ALIGNMENT, HUGE_PAGE_BYTES
from workers.runtime import memfd
from workers.runtime.agreement import PROBLEM, Agree, first_problem
from workers.runtime.handshake import Facts

_PLACE = ("path", "label")  # of a rank's memory
_DRAW_BYTES, _ID_BYTES = 8 * len(Draw._fields), 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartForm:
    """What a rank's memory holds; every rank knows those of all."""

    num_blocks: int
    block_bytes: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int  # of a step
    vocab_size: int
    num_logits: int  # rows, of which all ranks leave their columns with this one

    @property
    def work_bytes(self) -> int:
        """QKV rows and attended rows in bfloat16."""
        return self.max_tokens * 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * 2

    @property
    def num_bytes(self) -> int:
        return _up(self._logits_start + self._logits_bytes + memfd.LABEL_BYTES, HUGE_PAGE_BYTES)

    def part(self, memory: torch.Tensor) -> RankPart:
        pool = memory[: self.num_blocks * self.block_bytes].view(self.num_blocks, self.block_bytes)
        work = memory[self._work_start :][: self.work_bytes]
        return RankPart(
            pool=pool,
            work=work,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            logits=self._logits(memory[self._logits_start :]) if self.num_logits else None,
        )

    @property
    def _work_start(self) -> int:
        return _up(self.num_blocks * self.block_bytes, ALIGNMENT)

    @property
    def _logits_start(self) -> int:
        return _up(self._work_start + self.work_bytes, ALIGNMENT)

    @property
    def _draws_bytes(self) -> int:
        return _up(self.num_logits * (_DRAW_BYTES + _ID_BYTES), ALIGNMENT)

    @property
    def _logits_bytes(self) -> int:
        return self._draws_bytes + self.num_logits * self.vocab_size * 4

    def _logits(self, memory: torch.Tensor) -> LogitsPart:
        rows, ids_start = self.num_logits, self.num_logits * _DRAW_BYTES
        draws, ids = memory[:ids_start], memory[ids_start:][: rows * _ID_BYTES]
        return LogitsPart(
            logits=memory[self._draws_bytes : self._logits_bytes].view(torch.float32).view(rows, -1),
            draws=draws.view(torch.float64).view(rows, -1),
            ids=ids.view(torch.int64),
        )


def share(
    rank: int, forms: Sequence[PartForm], agree: Agree, load: Callable[[], Library] = load_library
) -> tuple[RankPart, ...] | None:
    """On every rank of the group at the same time: the parts of all, zeros; None where one rank cannot, with
    one line in the log of rank 0. Raises what `agree` raises."""
    library, own, problem, fd = None, None, "", -1
    offer: Facts = {}
    try:
        library = load()
        fd, own, offer = _create(library, forms[rank].num_bytes)
        offer = {**offer, **_common(library, forms)}
    except (KernelsUnavailable, OSError) as error:
        problem = str(error)
    try:
        verdict = agree({**offer, PROBLEM: problem}, _offers)
        parts = None
        if not verdict[PROBLEM]:
            assert library is not None and own is not None
            try:
                parts = _parts(library, rank, own, forms, verdict)
            except OSError as error:
                problem = str(error)
            verdict = agree({PROBLEM: problem}, first_problem)
    finally:
        if fd >= 0:
            os.close(fd)
    if not verdict[PROBLEM]:
        return parts
    if rank == 0:
        _log.warning("the ranks do not share their attention: %s", verdict[PROBLEM])
    return None


def _common(library: Library, forms: Sequence[PartForm]) -> Facts:
    """What has to be equal: ranks that differ would read each other's rows at other places, or divide a step
    into other tasks. Sizes do not show it: they are rounded up."""
    found = {
        f"{name} of rank {rank}": value
        for rank, form in enumerate(forms)
        for name, value in asdict(form).items()
    }
    has_tiles = library.has_linear and library.can_use_tiles
    return {**found, "has_linear": int(library.has_linear), "can_use_tiles": int(has_tiles)}


def _offers(by_rank: dict[int, Facts]) -> Facts:
    """Where everybody's memory is, or the first problem."""
    verdict = first_problem(by_rank)
    if verdict[PROBLEM]:
        return {PROBLEM: verdict[PROBLEM]}
    for rank, facts in by_rank.items():
        for name, first in by_rank[0].items():
            if name not in (*_PLACE, PROBLEM) and facts.get(name) != first:
                return {PROBLEM: f"rank {rank}: {name} is {facts.get(name)}, and {first} for rank 0"}
    offers = {f"{name} {rank}": facts[name] for rank, facts in by_rank.items() for name in _PLACE}
    return {**offers, PROBLEM: ""}


def _create(library: Library, num_bytes: int) -> tuple[int, torch.Tensor, Facts]:
    """Descriptor, memory, and what others need to open it. Of each huge page a small one is taken first: then
    the rest is zeroed once, as a whole, where there are huge pages, and else by the seal."""
    fd = memfd.create("tandem-pool", num_bytes)
    try:
        for start in range(0, num_bytes, HUGE_PAGE_BYTES):
            os.posix_fallocate(fd, start, 1)
        memory = shared_bytes(library, fd, num_bytes)
        return fd, memory, {"path": memfd.path_of(fd), "label": memfd.seal(fd).hex()}
    except OSError:
        os.close(fd)
        raise


def _parts(
    library: Library, rank: int, own: torch.Tensor, forms: Sequence[PartForm], offers: Facts
) -> tuple[RankPart, ...]:
    """Raises OSError."""
    parts = []
    for other, form in enumerate(forms):
        memory = own if other == rank else _open(library, other, form.num_bytes, offers)
        parts.append(form.part(memory))
    return tuple(parts)


def _open(library: Library, owner: int, num_bytes: int, offers: Facts) -> torch.Tensor:
    path, label = str(offers[f"path {owner}"]), bytes.fromhex(str(offers[f"label {owner}"]))
    with memfd.opened(path, label, num_bytes, owner) as fd:
        return shared_bytes(library, fd, num_bytes)


def _up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
