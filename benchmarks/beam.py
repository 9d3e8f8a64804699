"""Beam search beside as many plain requests: time per token in turn, and KV blocks by width.

    python -m benchmarks.beam --model FOLDER [--widths 2 4 8] [--runs N] [--output FILE]

A search of width W and a batch of W plain requests compute W rows a step. Only the steps after the prompts
count, medians over the runs; the two take turns. Beside seconds stands the CPU time of the process, which is
what is worth something on a busy machine. KV blocks are the most that were held at once, with a prompt of 512
tokens and 64 new ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from cluster.figures.machine import facts
from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig
from workers.engine.engine import Engine
from workers.runtime.launch import LocalGroup
from workers.types import BeamParams, GenerateRequest, RequestId, SamplingParams

_PROMPT_TOKENS = 128  # where time is taken
_LONG_PROMPT_TOKENS, _LONG_NEW_TOKENS = 512, 64  # where blocks are counted


class Cost(NamedTuple):
    """Of a step, in the mean."""

    seconds: float
    cpu_s: float  # of this process, all threads


class Subject:
    """An engine over the one group of this process, its cache fresh for every run."""

    def __init__(self, group: LocalGroup, config: GroupConfig) -> None:
        self._group = group
        self._config = config

    def search(self, width: int, new_tokens: int) -> Cost:
        """Of a token of a beam search."""
        return self._cost([self._search(width, _PROMPT_TOKENS, new_tokens)], new_tokens)

    def batch(self, size: int, new_tokens: int) -> Cost:
        """Of a step of as many plain requests, each with a prompt of its own."""
        requests = [
            self._request(f"plain-{seed}", self._prompt(_PROMPT_TOKENS, seed), new_tokens)
            for seed in range(size)
        ]
        return self._cost(requests, new_tokens)

    def most_blocks(self, width: int) -> int:
        """KV blocks held at once, at most."""
        engine, most = self._engine(), 0
        engine.add(self._search(width, _LONG_PROMPT_TOKENS, _LONG_NEW_TOKENS))
        while engine.has_work():
            engine.step()
            most = max(most, engine.stats().active_blocks)
        return most

    def _cost(self, requests: Sequence[GenerateRequest], new_tokens: int) -> Cost:
        engine = self._engine()
        for request in requests:
            engine.add(request)
        while engine.stats().waiting_tokens:
            engine.step()
        before = engine.stats().num_steps
        started, cpu_started = perf_counter(), process_time()
        while engine.has_work():
            engine.step()
        seconds, cpu_s = perf_counter() - started, process_time() - cpu_started
        num_steps = engine.stats().num_steps - before
        assert num_steps == new_tokens - 1, f"{num_steps} steps for {new_tokens} tokens"
        return Cost(seconds / num_steps, cpu_s / num_steps)

    def _engine(self) -> Engine:
        return Engine(
            limits=self._group.facts.limits,
            cache=self._config.cache,
            schedule=self._config.schedule,
            executor=self._group.executor,
        )

    def _search(self, width: int, num_prompt: int, new_tokens: int) -> GenerateRequest:
        beam = BeamParams(width=width)
        return self._request("search", self._prompt(num_prompt, 0), new_tokens, beam)

    def _prompt(self, length: int, seed: int) -> tuple[int, ...]:
        vocab_size = self._group.facts.limits.vocab_size
        return tuple(
            10 + (7919 * (seed + 1) + i * i * 31 + i * 101) % (vocab_size - 10) for i in range(length)
        )

    def _request(
        self, name: str, prompt: tuple[int, ...], new_tokens: int, beam: BeamParams | None = None
    ) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return GenerateRequest(
            request_id=RequestId(name), prompt_token_ids=prompt, sampling=sampling, beam=beam
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beam")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    config = GroupConfig(
        model=ModelConfig(path=str(options.model)),
        cache=CacheConfig(num_blocks=1024),
        parallel=ParallelConfig(threads_per_rank=options.threads, device="cpu"),
    )
    with LocalGroup(config) as group:
        subject = Subject(group, config)
        samples: dict[str, list[tuple[Cost, Cost]]] = {}
        for width in options.widths:
            pairs = samples[str(width)] = []
            for _ in range(options.runs):
                search = subject.search(width, options.new_tokens)
                pairs.append((search, subject.batch(width, options.new_tokens)))
            search_ms, batch_ms = (
                1e3 * statistics.median(cost.seconds for cost in side) for side in zip(*pairs, strict=True)
            )
            ratio = statistics.median(search.seconds / batch.seconds for search, batch in pairs)
            cpu_ratio = statistics.median(search.cpu_s / batch.cpu_s for search, batch in pairs)
            print(
                f"width {width}: {search_ms:.2f} ms a token, {width} plain requests {batch_ms:.2f} ms, "
                f"ratio {ratio:.2f}, of CPU time {cpu_ratio:.2f}",
                flush=True,
            )
        blocks = {width: subject.most_blocks(width) for width in (1, *options.widths)}
        for width, most in blocks.items():
            print(f"width {width}: {most} KV blocks, {most / blocks[1]:.2f} times")
    if options.output is not None:
        content = {"seconds": samples, "blocks": blocks, "machine": facts(), "new_tokens": options.new_tokens}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
