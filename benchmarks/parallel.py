"""One rank with two threads beside two ranks with one thread each: whole engines on one machine, in turn.

    python -m benchmarks.parallel --model FOLDER [--batches 8 32] [--runs N] [--new-tokens N]

Every run decodes every batch on both, with fresh random prompts, and prints milliseconds a step; at the end
the medians and their ratio (above 1: two ranks are faster), and a line of JSON with all samples, machine and
commit. A busy machine makes it worthless.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.spin import spin_briefly
from cluster.figures.machine import facts
from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig
from workers.engine.engine import Engine
from workers.runtime.launch import LocalGroup
from workers.types import GenerateRequest, RequestId, SamplingParams

PROMPT_TOKENS = 128


class Subject:
    """An engine over ranks of this machine; rank 0 is this process."""

    def __init__(self, folder: Path, ranks: int, threads: int) -> None:
        config = GroupConfig(
            model=ModelConfig(path=str(folder), dtype="bfloat16"),
            cache=CacheConfig(max_bytes=1 << 29, prefix_reuse=False),
            schedule=ScheduleConfig(max_running=64, max_step_tokens=8192),
            parallel=ParallelConfig(device="cpu", tensor_parallel=ranks, threads_per_rank=threads),
        )
        self.name = f"{ranks} x {threads}"
        self._threads = threads
        self.group = LocalGroup(config)
        self.engine = Engine(
            limits=self.group.facts.limits,
            cache=config.cache,
            schedule=config.schedule,
            executor=self.group.executor,
        )
        self._number = 0

    def decode_ms(self, batch: int, new_tokens: int) -> float:
        """Median milliseconds of a step in which every sequence gets one token."""
        torch.set_num_threads(self._threads)
        for _ in range(batch):
            self._number += 1
            self.engine.add(
                GenerateRequest(
                    request_id=RequestId(f"bench-{self._number}"),
                    prompt_token_ids=tuple(torch.randint(10, 4000, (PROMPT_TOKENS,)).tolist()),
                    sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
                )
            )
        steps = []
        while self.engine.has_work():
            started = perf_counter()
            chunks = self.engine.step()
            if sum(len(chunk.token_ids) for chunk in chunks) == batch:
                steps.append((perf_counter() - started) * 1e3)
        return statistics.median(steps[1:])  # the first ends the prompts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args()
    found: dict[tuple[int, str], list[float]] = {}
    with ExitStack() as stack:
        subjects = []
        for ranks, threads in ((1, 2), (2, 1)):
            subjects.append(Subject(options.model, ranks, threads))
            stack.callback(subjects[-1].group.close)
        for run in range(options.runs):
            for batch in options.batches:
                for subject in subjects:
                    took = subject.decode_ms(batch, options.new_tokens)
                    found.setdefault((batch, subject.name), []).append(took)
                    print(f"run {run + 1}: batch {batch}, {subject.name}: {took:.2f} ms", flush=True)
    rows = []
    for batch in options.batches:
        samples = {subject.name: found[batch, subject.name] for subject in subjects}
        one, two = map(statistics.median, samples.values())
        print(f"batch {batch}: one rank {one:.2f} ms, two ranks {two:.2f} ms, ratio {one / two:.3f}")
        rows.append({"batch": batch, "ratio": one / two, "samples_ms": samples})
    print(json.dumps({"rows": rows, "machine": facts()}))


if __name__ == "__main__":
    spin_briefly()
    main()
