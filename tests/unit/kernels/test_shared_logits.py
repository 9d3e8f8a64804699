"""Ranks that leave their logits in one place and draw from them together: threads of this process."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.builds import build
from tests.unit.kernels.test_fused import DIM, HIDDEN, VOCAB, kernels, make_model, noise, step_of, turn_of
from workers.kernels import NOT_FINITE, Draw, Drawn, FusedStep, LogitsPart, RankPart, StepMessage, StepModel
from workers.kernels.collective import CollectiveFailed, SharedCollective, memory_bytes
from workers.kernels.native import CpuKernels

SIZE = 3
WHOLE = SIZE * VOCAB
ROOM = 6  # rows
MAX_TOKENS = 40
PATIENCE_S = 60.0
BEST = Draw(0.0, 0, 1.0, 0.0, 0.0)
DRAWS = (
    BEST,
    Draw(0.8, 0, 1.0, 0.0, 0.999),
    Draw(1.3, 20, 0.9, 0.01, 0.5),
    Draw(1.0, 0, 0.7, 0.0, 0.3),
    BEST,
    Draw(2.0, 1, 1.0, 0.0, 0.1),
)
MISSING = -7  # no id
WIDE = 1 << 17  # columns of a rank

__all__ = ["kernels"]  # a fixture


class Group:
    """Ranks with weights of their own; `sharing` is what each has in mind, by rank."""

    def __init__(self, kernels: CpuKernels, *, timeout_s: float = PATIENCE_S) -> None:
        library = build("native")
        memory = mmap.mmap(-1, memory_bytes(library, SIZE))
        plain = make_model(kernels, torch.bfloat16, bias=False, head_norm=False)
        self.collectives = [
            SharedCollective(library, memory, rank=rank, size=SIZE, timeout_s=timeout_s)
            for rank in range(SIZE)
        ]
        self.models: list[StepModel] = [
            replace(
                plain,
                head=make_model(kernels, torch.bfloat16, bias=True, head_norm=False).head,
                collective=collective,
                head_widths=(VOCAB,) * SIZE,
            )
            for collective in self.collectives
        ]
        self.pools = [noise() for _ in range(SIZE)]
        self.turn = turn_of(DIM)
        self.logits = logits_part()
        self.sharing: list[LogitsPart | None] = [self.logits] * SIZE
        self._kernels = kernels

    def steps(self, *, is_shared: bool) -> list[FusedStep]:
        steps = [step for model in self.models if (step := self._kernels.fuse(model)) is not None]
        parts = [
            RankPart(
                pool=pool.memory,
                work=torch.zeros(
                    MAX_TOKENS * 2 * (model.num_heads + model.num_kv_heads) * DIM * 2, dtype=torch.uint8
                ),
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
            )
            for model, pool in zip(self.models, self.pools, strict=True)
        ]
        for step, logits in zip(steps, self.sharing, strict=True):
            if is_shared:
                step.share((replace(parts[0], logits=logits), *parts[1:]), MAX_TOKENS)
        return steps

    def run(
        self, steps: Sequence[FusedStep], message: StepMessage, draws: Sequence[Draw] = (), threads: int = 1
    ) -> list[Drawn | str]:
        """Of every rank, or how its step failed."""

        def of(rank: int) -> Drawn | str:
            torch.set_num_threads(threads)
            try:
                return steps[rank](message, self.turn, self.pools[rank], draws if rank == 0 else ())
            except CollectiveFailed as error:
                return str(error)

        with ThreadPoolExecutor(SIZE) as executor:
            return list(executor.map(of, range(SIZE)))

    def whole(self, message: StepMessage) -> torch.Tensor:
        """The logits as ranks that share nothing have them."""
        found = self.run(self.steps(is_shared=False), message)
        return torch.cat([each.logits for each in found if isinstance(each, Drawn)], dim=1)


def logits_part(width: int = WHOLE) -> LogitsPart:
    return LogitsPart(
        logits=torch.zeros(ROOM, width),
        draws=torch.zeros(ROOM, len(BEST), dtype=torch.float64),
        ids=torch.full((ROOM,), MISSING),
    )


def decoding(rows: int) -> StepMessage:
    return step_of([(3 + row, 1) for row in range(rows)], list(range(rows)))


@pytest.mark.parametrize("threads", [1, 2])
def test_rank_0_has_all_logits_and_the_ids_drawn_from_them(kernels: CpuKernels, threads: int) -> None:
    """Step after step: whole rooms, single rows, a prompt, and steps from which nothing is drawn."""
    group = Group(kernels)
    steps = group.steps(is_shared=True)
    prompt = step_of([(0, 30), (5, 1)], [29, 30])
    for message, rows in ((decoding(ROOM), ROOM), (decoding(1), 1), (prompt, 2), (decoding(ROOM), ROOM)):
        wanted = group.whole(message)
        assert wanted.shape == (rows, WHOLE)
        for draws in (DRAWS[:rows], (), DRAWS[-rows:]):
            assert all(step.shares_logits(rows) for step in steps)
            found = group.run(steps, message, draws, threads)[0]
            assert isinstance(found, Drawn) and torch.equal(found.logits, wanted)
            assert found.logits.data_ptr() == group.logits.logits.data_ptr()
            assert found.ids == (kernels.draw(wanted, draws, only_finite=True) if draws else [])
            assert found.hidden is not None and found.hidden.shape[0] == rows


def test_a_value_of_any_rank_that_is_no_number_spoils_its_row(kernels: CpuKernels) -> None:
    group = Group(kernels)
    normal = group.models[2].head
    bias = torch.zeros(VOCAB, dtype=torch.bfloat16)
    bias[-1] = float("nan")
    group.models[2] = replace(
        group.models[2],
        head=kernels.pack_linear(
            torch.zeros(VOCAB, normal.in_features, dtype=torch.bfloat16), bias, torch.float32
        ),
    )
    found = group.run(group.steps(is_shared=True), decoding(2), (BEST, DRAWS[1]))[0]
    assert isinstance(found, Drawn) and found.ids == [NOT_FINITE] * 2


def test_rows_without_room_stay_with_their_ranks(kernels: CpuKernels) -> None:
    group = Group(kernels)
    message = decoding(ROOM + 1)
    wanted = group.whole(message)
    steps = group.steps(is_shared=True)
    assert not any(step.shares_logits(rows) for step in steps for rows in (0, ROOM + 1))
    found = group.run(steps, message)
    columns = [each.logits for each in found if isinstance(each, Drawn)]
    assert [each.shape for each in columns] == [(ROOM + 1, VOCAB)] * SIZE
    assert torch.equal(torch.cat(columns, dim=1), wanted)
    assert not group.logits.logits.any()


def test_ids_are_drawn_by_others(kernels: CpuKernels) -> None:
    """One that puts them elsewhere than the others is noticed. On a busy machine rank 0 is mostly done before
    others have a core, so this may take many steps."""
    group = Group(kernels)
    group.sharing[1] = group.logits._replace(ids=torch.full((ROOM,), MISSING))
    steps, message = group.steps(is_shared=True), decoding(ROOM)
    wanted = kernels.draw(group.whole(message), DRAWS, only_finite=True)
    is_helped, deadline_s = False, time.monotonic() + PATIENCE_S
    while not is_helped and time.monotonic() < deadline_s:
        group.logits.ids.fill_(MISSING)
        found = group.run(steps, message, DRAWS)[0]
        assert isinstance(found, Drawn)
        is_helped = MISSING in found.ids
        assert all(got in (MISSING, want) for got, want in zip(found.ids, wanted, strict=True))
    assert is_helped


def test_a_rank_that_leaves_no_logits_ends_the_step(kernels: CpuKernels) -> None:
    group = Group(kernels, timeout_s=1.0)
    group.sharing[2] = None
    found = group.run(group.steps(is_shared=True), decoding(2), (BEST, BEST))
    assert found[:2] == ["rank 2 did not come to a collective within 1 s"] * 2
    assert isinstance(found[2], Drawn)  # that has its own columns


def test_a_wait_for_logits_ends_with_the_group(kernels: CpuKernels) -> None:
    group = Group(kernels)
    group.sharing[2] = None
    started = time.monotonic()
    end = threading.Timer(0.5, group.collectives[2].abort)
    end.start()
    found = group.run(group.steps(is_shared=True), decoding(2), (BEST, BEST))
    assert found[:2] == ["the group has been given up"] * 2
    assert time.monotonic() - started < PATIENCE_S / 2


def test_threads_end_together_when_the_group_is_given_up_as_they_draw(kernels: CpuKernels) -> None:
    """From a row so wide that it takes its time: one thread of six draws, the others wait for it."""
    wide = replace(
        make_model(kernels, torch.bfloat16, bias=False, head_norm=False),
        head=kernels.pack_linear(torch.randn(WIDE, HIDDEN).to(torch.bfloat16), None, torch.float32),
        head_widths=(WIDE,) * SIZE,
    )
    ends: set[object] = set()
    for share in (0.5, 0.6, 0.7, 0.8) * 5:  # of the time that a step takes
        group = Group(kernels)
        group.models = [replace(wide, collective=collective) for collective in group.collectives]
        group.sharing = [logits_part(SIZE * WIDE)] * SIZE
        steps = group.steps(is_shared=True)

        def step(group: Group = group, steps: Sequence[FusedStep] = steps) -> Drawn | str:
            return group.run(steps, decoding(1), [DRAWS[1]], threads=2)[0]

        step()
        started = time.monotonic()
        step()
        end = threading.Timer(share * (time.monotonic() - started), group.collectives[2].abort)
        end.start()
        found = step()
        end.join()
        ends.add(found if isinstance(found, str) else None)
    assert "the group has been given up" in ends <= {"the group has been given up", None}
