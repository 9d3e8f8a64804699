"""Collectives in shared memory: exact values, the same bits on all ranks, and ends in time.

Two and three processes for the values; for failures and other builds the ranks are threads of this process.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.unit.kernels.builds import MARCHES, PACKED, build
from tests.unit.kernels.collective_rank import (
    NUM_ROUNDS,
    PATIENCE_S,
    SIZES,
    WIDTHS,
    columns,
    digest,
    part,
    sums,
)
from workers.kernels import balanced, divide, one_leaf
from workers.kernels.collective import CollectiveFailed, SharedCollective, memory_bytes
from workers.kernels.native import CpuKernels

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 0.5


def expected_sum(size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """In the order of the ranks, in float32, rounded once."""
    total = part(0, n, dtype).float()
    for rank in range(1, size):
        total += part(rank, n, dtype).float()
    return total.to(dtype)


def expected_sums(size: int) -> dict[str, str]:
    return {
        f"{dtype} {n}": digest(expected_sum(size, n, dtype))
        for dtype in (torch.float32, torch.bfloat16)
        for n in SIZES
    }


def run_processes(size: int) -> list[object]:
    """What each rank found."""
    fd = os.memfd_create("test")
    os.truncate(fd, memory_bytes(build("native"), size))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.kernels.collective_rank", str(fd), str(rank), str(size)],
            cwd=ROOT,
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    os.close(fd)
    try:
        outputs = [process.communicate(timeout=2 * PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert [process.returncode for process in processes] == [0] * size
    return [json.loads(output) for output in outputs]


def in_threads(
    size: int, work: Callable[[SharedCollective, int], object], *, timeout_s: float, march: str = "native"
) -> list[object]:
    """What `work` returned, or how it failed, on each of `size` ranks."""
    library = build(march)
    memory = mmap.mmap(-1, memory_bytes(library, size))

    def run(rank: int) -> object:
        collective = SharedCollective(library, memory, rank=rank, size=size, timeout_s=timeout_s)
        try:
            return work(collective, rank)
        except CollectiveFailed as error:
            with pytest.raises(CollectiveFailed, match=str(error)):  # and from then on
                collective.all_reduce(torch.ones(1))
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_exact_values_and_the_same_bits_on_all_ranks(size: int) -> None:
    """Sums; columns side by side on rank 0; many short rounds to which ranks come late; sums again."""
    gathered = [
        digest(torch.cat([columns(rank, rows, widths[rank]) for rank in range(size)], dim=1))
        for widths in WIDTHS
        for rows in (0, 1, 5)
    ]
    wanted = expected_sums(size)
    assert run_processes(size) == [
        [wanted, gathered if rank == 0 else [""] * len(gathered), NUM_ROUNDS, wanted] for rank in range(size)
    ]


@pytest.mark.parametrize("march", [march for march in MARCHES if march != "native"])
def test_builds_for_older_cpus_give_the_same_bits(march: str) -> None:
    assert in_threads(4, sums, timeout_s=PATIENCE_S, march=march) == [expected_sums(4)] * 4


@pytest.mark.skipif(not PACKED, reason="no packed products on this CPU")
@pytest.mark.parametrize("march", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_join_keeps_the_denormals_that_one_rank_keeps(march: str, dtype: torch.dtype) -> None:
    order = balanced([one_leaf(32), one_leaf(32)])
    parts, nodes = divide(order, [range(1), range(1, 2)])
    weight = torch.zeros(4, 64, dtype=dtype)
    weight[:, 0], weight[:, 32] = 1.5 * 2.0**-126, -(2.0**-126)
    kernels, x = CpuKernels(build(march), dtype), torch.ones(3, 64, dtype=dtype)
    alone = kernels.pack_part(weight, torch.float32, order).nodes(x)[0]

    def work(collective: SharedCollective, rank: int) -> torch.Tensor:
        torch.set_num_threads(1)
        inputs = slice(32 * rank, 32 * rank + 32)
        own = kernels.pack_part(weight[:, inputs].contiguous(), torch.float32, parts[rank])
        return collective.join(own.nodes(x[:, inputs]), nodes, None, torch.float32)

    assert alone.tolist() == [[2.0**-127] * 4] * 3
    for found in in_threads(2, work, timeout_s=PATIENCE_S, march=march):
        assert isinstance(found, torch.Tensor) and torch.equal(found, alone)


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    def work(collective: SharedCollective, rank: int) -> float:
        started = time.monotonic()
        if rank != 2:
            with pytest.raises(CollectiveFailed) as raised:
                collective.all_reduce(torch.ones(10))
            assert str(raised.value) == "rank 2 did not come to a collective within 0.5 s"
        return time.monotonic() - started

    first, second, _ = in_threads(3, work, timeout_s=TIMEOUT_S)
    assert isinstance(first, float) and isinstance(second, float)
    assert min(first, second) >= TIMEOUT_S and max(first, second) < TIMEOUT_S + 5


def test_a_rank_in_another_collective_is_named() -> None:
    def work(collective: SharedCollective, rank: int) -> None:
        collective.all_reduce(torch.ones(10))
        collective.all_reduce(torch.ones(10 - rank))

    assert in_threads(2, work, timeout_s=PATIENCE_S) == [
        "rank 1 is in another collective than rank 0",
        "rank 0 is in another collective than rank 1",
    ]


def test_a_group_that_is_given_up_waits_no_more() -> None:
    def work(collective: SharedCollective, rank: int) -> None:
        if rank == 2:
            time.sleep(0.2)  # the others wait in the kernel by now
            collective.abort()
        collective.all_reduce(torch.ones(10))

    started = time.monotonic()
    assert in_threads(3, work, timeout_s=PATIENCE_S) == ["the group has been given up"] * 3
    assert time.monotonic() - started < PATIENCE_S / 2


def test_a_gather_waits_for_rank_0_only_when_its_buffers_are_full() -> None:
    def work(collective: SharedCollective, rank: int) -> str:
        if rank == 0:
            time.sleep(0.2)
        started = time.monotonic()
        collective.gather_columns(torch.ones(4, 10), (10, 10))
        assert rank == 0 or time.monotonic() - started < 0.15
        collective.gather_columns(torch.ones(4, 100_000), (100_000, 100_000))
        return "done"

    assert in_threads(2, work, timeout_s=PATIENCE_S) == ["done", "done"]
