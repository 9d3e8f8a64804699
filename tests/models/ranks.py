"""Starts the ranks of a tensor-parallel test as processes and collects what rank 0 found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from workers.kernels import load_library, memory_bytes


@dataclass(frozen=True)
class Work:
    """One checkpoint to run: score the texts, continue the prompts greedily."""

    folder: str
    texts: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    chunk: int | None = None
    dtype: str = "float32"
    quantization: str = "none"
    kv_dtype: str | None = None  # None: as dtype


@dataclass(frozen=True)
class Found:
    """What rank 0 found: greedy ids and logits, or why the decoder could not be built."""

    ids: list[list[int]]
    logits: list[torch.Tensor]
    error: str | None


def run_ranks(
    folder: Path, size: int, works: Sequence[Work], *, shares_memory: bool = True, timeout_s: float = 100.0
) -> list[Found]:
    """Runs all works on `size` ranks. Fails with the ranks' output when one of them fails or hangs.

    shares_memory: what the decoder adds up goes through shared memory, otherwise through gloo.
    """
    job = folder / f"job{size}.json"
    memory = os.memfd_create("ranks") if shares_memory else None
    job.write_text(json.dumps({"size": size, "works": [asdict(work) for work in works], "memory": memory}))
    if memory is not None:
        os.truncate(memory, memory_bytes(load_library(), size))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.models.rank_worker", str(job), str(rank)],
            cwd=Path(__file__).parents[2],
            env=environment,
            pass_fds=[] if memory is None else [memory],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    if memory is not None:
        os.close(memory)
    deadline = time.monotonic() + timeout_s
    try:
        for number, rank in enumerate(ranks):
            output, _ = rank.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert rank.returncode == 0, f"rank {number} of {size}:\n{output}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    tensors = load_file(f"{job}.safetensors")
    found = []
    for number, result in enumerate(json.loads(Path(f"{job}.out").read_text())):
        logits = [tensors[f"{number}.{i}"] for i in range(len(works[number].texts)) if "error" not in result]
        found.append(Found(result.get("ids", []), logits, result.get("error")))
    return found
