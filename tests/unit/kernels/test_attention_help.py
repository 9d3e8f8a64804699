"""Ranks that do attention for each other: the bits of ranks that do not. They are threads of this process."""

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
from tests.unit.kernels.test_fused import DIM, VOCAB, kernels, make_model, noise, step_of, turn_of
from workers.kernels import FusedStep, PagedCache, RankPart, StepMessage, StepModel, Turn
from workers.kernels.collective import CollectiveFailed, SharedCollective, memory_bytes
from workers.kernels.native import CpuKernels

KV_HEADS = (3, 1, 2)  # of each rank: the second has least to do
MAX_TOKENS = 130
DECODING = ([(70, 1), (3, 1), (64, 1), (17, 1)], [0, 1, 2, 3])
MIXED = ([(0, 120), (9, 1)], [119, 120])
PATIENCE_S = 60.0

__all__ = ["kernels"]  # a fixture


def make_models(kernels: CpuKernels, timeout_s: float = PATIENCE_S) -> list[StepModel]:
    """Of ranks whose weights differ."""
    library, size = build("native"), len(KV_HEADS)
    memory = mmap.mmap(-1, memory_bytes(library, size))
    return [
        replace(
            make_model(kernels, torch.bfloat16, bias=False, head_norm=False, kv_heads=heads),
            collective=SharedCollective(library, memory, rank=rank, size=size, timeout_s=timeout_s),
        )
        for rank, heads in enumerate(KV_HEADS)
    ]


def parts_of(models: Sequence[StepModel], pools: Sequence[PagedCache]) -> tuple[RankPart, ...]:
    return tuple(
        RankPart(
            pool=pool.memory,
            work=torch.zeros(
                MAX_TOKENS * 2 * (model.num_heads + model.num_kv_heads) * DIM * 2,
                dtype=torch.uint8,
            ),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
        )
        for model, pool in zip(models, pools, strict=True)
    )


def fuse(kernels: CpuKernels, models: Sequence[StepModel]) -> list[FusedStep]:
    return [step for model in models if (step := kernels.fuse(model)) is not None]


def run(
    steps: Sequence[FusedStep],
    message: StepMessage,
    turn: Turn,
    pools: Sequence[PagedCache],
    threads: int = 1,
    times: int = 1,
) -> list[list[torch.Tensor]]:
    """The logits of every rank, of each time."""

    def of(rank: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        return [steps[rank](message, turn, pools[rank]).logits.clone() for _ in range(times)]

    with ThreadPoolExecutor(len(steps)) as executor:
        return list(executor.map(of, range(len(steps))))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("mix", "logit_rows"), [DECODING, MIXED])
def test_helpers_change_no_bit(
    kernels: CpuKernels,
    mix: list[tuple[int, int]],
    logit_rows: list[int],
    dtype: torch.dtype,
    threads: int,
) -> None:
    message, turn = step_of(mix, logit_rows), turn_of(DIM)
    models = make_models(kernels)
    pools = [noise(DIM, dtype, heads) for heads in KV_HEADS]
    alone = [pool.clone() for pool in pools]
    wanted = run(fuse(kernels, models), message, turn, alone, threads)
    steps = fuse(kernels, models)
    parts = parts_of(models, pools)
    for step in steps:
        step.share(parts, MAX_TOKENS)
    found = run(steps, message, turn, pools, threads, times=4)
    for rank in range(len(KV_HEADS)):
        assert all(torch.equal(each, wanted[rank][0]) for each in found[rank]), rank
        assert torch.equal(pools[rank].memory, alone[rank].memory), rank


def test_tasks_are_done_by_others(kernels: CpuKernels) -> None:
    """A helper that has another pool in mind than the owner is noticed: it does take part. On a busy machine
    the owner is mostly done before others have a core, so this may take many steps."""
    message, turn = step_of([(50, 1)] * 8, list(range(8))), turn_of(DIM)
    models = make_models(kernels)
    pools = [noise(DIM, torch.bfloat16, heads) for heads in KV_HEADS]
    wanted = run(fuse(kernels, models), message, turn, [pool.clone() for pool in pools])
    steps, parts = fuse(kernels, models), parts_of(models, pools)
    wrong = replace(parts[0], pool=noise(DIM, torch.bfloat16, KV_HEADS[0]).memory)
    for rank, step in enumerate(steps):
        step.share(parts if rank == 0 else (wrong, *parts[1:]), MAX_TOKENS)
    is_helped, deadline = False, time.monotonic() + PATIENCE_S
    while not is_helped and time.monotonic() < deadline:
        found = run(steps, message, turn, pools, times=50)
        is_helped = not all(torch.equal(each, wanted[0][0]) for each in found[0])
    assert is_helped


def test_a_step_without_room_is_done_alone(kernels: CpuKernels) -> None:
    message, turn = step_of([(0, MAX_TOKENS + 1)], [MAX_TOKENS]), turn_of(DIM)
    models = make_models(kernels)
    pools = [noise(DIM, torch.bfloat16, heads) for heads in KV_HEADS]
    wanted = run(fuse(kernels, models), message, turn, [pool.clone() for pool in pools])
    steps, parts = fuse(kernels, models), parts_of(models, pools)
    for step in steps:
        step.share(parts, MAX_TOKENS)
    found = run(steps, message, turn, pools)
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(found, wanted, strict=True))
    assert found[0][0].shape == (1, VOCAB)
    assert all(not part.work.any() for part in parts)


def outcomes(steps: Sequence[FusedStep], pools: Sequence[PagedCache]) -> list[str]:
    """What each rank said of its failed step."""

    def of(rank: int) -> str:
        with pytest.raises(CollectiveFailed) as caught:
            steps[rank](step_of(*DECODING), turn_of(DIM), pools[rank])
        return str(caught.value)

    with ThreadPoolExecutor(len(steps)) as executor:
        return list(executor.map(of, range(len(steps))))


def test_tasks_that_never_appear_end_the_step(kernels: CpuKernels) -> None:
    """The rank with least to do waits for another's tasks, which that one does without a word."""
    models = make_models(kernels, timeout_s=1.0)
    pools = [noise(DIM, torch.bfloat16, heads) for heads in KV_HEADS]
    steps = fuse(kernels, models)
    steps[1].share(parts_of(models, pools), MAX_TOKENS)
    assert "rank 2 did not come to a collective within 1 s" in outcomes(steps, pools)[1]


def test_a_wait_for_tasks_ends_with_the_group(kernels: CpuKernels) -> None:
    models = make_models(kernels)
    pools = [noise(DIM, torch.bfloat16, heads) for heads in KV_HEADS]
    steps = fuse(kernels, models)
    steps[1].share(parts_of(models, pools), MAX_TOKENS)
    collective = models[2].collective
    assert isinstance(collective, SharedCollective)
    end = threading.Timer(0.5, collective.abort)
    started = time.monotonic()
    end.start()
    assert outcomes(steps, pools) == ["the group has been given up"] * len(steps)
    assert time.monotonic() - started < PATIENCE_S / 2
