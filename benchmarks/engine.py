"""Our engine against transformers' generate on one machine, in turn, with the machine's ceilings beside.

    python -m benchmarks.engine [--model FOLDER] [--runs N] [--quick] [--json] [--out FILE]

Every run measures every work on every subject, one after the other, with fresh random prompts; a figure is
made of the median times over the runs. The peer of a work is the better of transformers' dynamic and static
cache. Each measurement is told on stderr as it ends. The last line of output is JSON: {"rows": [{"work",
"ours", "unit", "best_peer", "peer", "ratio_to_best_peer", "limit", "limit_share"}, ...]}; a ratio above 1 is
ahead in every unit. Quote only runs on a quiet machine: other programs slow the peers more than us.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.roofs import RoofMeter
from benchmarks.subjects import Subject, Tandem, Transformers
from benchmarks.works import Kind, Work, limit, standard_works
from cluster.embedded import ensure
from workers.model.architecture import ModelSpec
from workers.model.checkpoint import Checkpoint
from workers.model.spec import spec_from_config

DTYPE = "bf16"
MODEL_NAMES = {"smollm2-135m-instruct": "smollm2"}  # folder name -> name in the rows
OURS = "tandem"
MAX_TRIES = 5
# How long the threads of libgomp spin at barriers, for all subjects alike, as rank processes have it. By
# default other busy programs make a subject that waits there many times slower; alone it changes nothing.
SPIN_COUNT = "GOMP_SPINCOUNT"


class Bench:
    """Samples of all works on all subjects."""

    def __init__(
        self, subjects: dict[str, Subject], works: list[Work], vocab_size: int, meter: RoofMeter
    ) -> None:
        self._subjects = subjects
        self._works = works
        self._vocab_size = vocab_size
        self._random = torch.Generator().manual_seed(0)
        self.meter = meter
        # Of each work and subject: seconds to the first token and to the last, one pair a run.
        self.samples: dict[int, dict[str, list[tuple[float, float]]]] = {
            number: {name: [] for name in subjects} for number in range(len(works))
        }

    def run(self) -> Iterator[str]:
        """Measures every work once on every subject, in turn; yields a line about each as it ends."""
        for number, work in enumerate(self._works):
            self.meter.sample()
            for name, subject in self._subjects.items():
                first, last = self._measure(work, subject)
                self.samples[number][name].append((first, last))
                yield f"{work.label}: {name} {work.figure(first, last):.1f} {work.unit}"

    def warm_up(self) -> None:
        """Touches memory and code of every subject once, untimed."""
        for subject in self._subjects.values():
            subject.generate([self._prompt(32)] * 2, 4)

    def figures(self, number: int) -> dict[str, float]:
        """What each subject reached in a work, from the medians of its seconds."""
        work, found = self._works[number], self.samples[number]
        return {
            name: work.figure(*(statistics.median(column) for column in zip(*pairs, strict=True)))
            for name, pairs in found.items()
        }

    def _measure(self, work: Work, subject: Subject) -> tuple[float, float]:
        if work.kind is Kind.CACHED:
            prompt = self._prompt(work.prompt_tokens)
            first = subject.after_beginning(prompt[: work.cached_tokens], prompt)
            return first, first
        for _ in range(MAX_TRIES):
            first = subject.generate(self._prompts(work), 1)
            if work.kind is Kind.PREFILL:
                return first, first
            whole = subject.generate(self._prompts(work), work.new_tokens)
            if whole > first:
                return first, whole
        raise RuntimeError(
            f"{work.new_tokens} tokens took less time than one, {MAX_TRIES} times in a row: "
            "other programs keep this machine too busy to measure"
        )

    def _prompts(self, work: Work) -> list[list[int]]:
        return [self._prompt(work.prompt_tokens) for _ in range(work.batch)]

    def _prompt(self, length: int) -> list[int]:
        ids: list[int] = torch.randint(10, self._vocab_size, (length,), generator=self._random).tolist()
        return ids


def rows_of(bench: Bench, works: list[Work], model: str, spec: ModelSpec) -> list[dict[str, object]]:
    """Medians, the better peer of each work, and the share of the limit."""
    roofs = bench.meter.roofs()
    rows: list[dict[str, object]] = []
    for number, work in enumerate(works):
        figures = bench.figures(number)
        ours = figures.pop(OURS)
        peer = min(figures, key=lambda name: work.times_better(ours, figures[name]))
        ceiling = limit(work, spec, 2, roofs)
        rows.append(
            {
                "work": work.name(model, DTYPE),
                "ours": round(ours, 2),
                "unit": work.unit,
                "best_peer": round(figures[peer], 2),
                "peer": peer,
                "ratio_to_best_peer": round(work.times_better(ours, figures[peer]), 3),
                "limit": round(ceiling, 2),
                "limit_share": round(work.times_better(ours, ceiling), 3),
            }
        )
    return rows


def print_table(console: Console, rows: list[dict[str, object]], bench: Bench) -> None:
    roofs = bench.meter.roofs()
    table = Table(
        title=f"ceilings: read {roofs.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"bf16 products {roofs.flop_per_s / 1e9:.0f} Gflop/s"
    )
    for heading in ("work", "unit", "tandem", "best peer", "peer", "ratio", "limit", "share of limit"):
        table.add_column(heading, justify="left" if heading in ("work", "unit", "peer") else "right")
    keys = ("work", "unit", "ours", "best_peer", "peer", "ratio_to_best_peer", "limit", "limit_share")
    for row in rows:
        table.add_row(*(str(row[key]) for key in keys))
    console.print(table)


def record(path: Path, rows: list[dict[str, object]], bench: Bench, settings: dict[str, object]) -> None:
    """Everything needed to read the figures again: commit, machine, settings, every sample."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    content = {
        "rows": rows,
        "samples": [bench.samples[number] for number in sorted(bench.samples)],
        "roof_samples": bench.meter.samples(),
        "settings": settings,
        "commit": commit.stdout.strip() or "unknown",
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load_15_min": os.getloadavg()[2],  # far above our threads: others ran beside us
            "platform": platform.platform(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="folder in Hugging Face layout; default: the embedded model"
    )
    parser.add_argument("--runs", type=int, help="samples of every figure; default 5, or 1 with --quick")
    parser.add_argument(
        "--quick", action="store_true", help="short decodes, one run: does it work, roughly how fast"
    )
    parser.add_argument("--json", action="store_true", help="no table on stdout, only the JSON line")
    parser.add_argument("--out", type=Path, help="file for commit, machine and all samples")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    works = standard_works(new_tokens=16 if options.quick else 64)
    runs = options.runs or (1 if options.quick else 5)
    folder = options.model or ensure(Console(stderr=True).print)
    spec = spec_from_config(Checkpoint(folder).config)
    started = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {line}", file=sys.stderr, flush=True)

    tell("loading")
    with closing(Tandem(folder, options.threads, max_running=32)) as ours:
        subjects: dict[str, Subject] = {
            OURS: ours,
            "transformers dynamic cache": Transformers(folder, "dynamic"),
            "transformers static cache": Transformers(folder, "static"),
        }
        bench = Bench(subjects, works, spec.vocab_size, RoofMeter())
        tell("warming up")
        bench.warm_up()
        for run in range(runs):
            for line in bench.run():
                tell(f"run {run + 1} of {runs}: {line}")
    rows = rows_of(bench, works, MODEL_NAMES.get(folder.name.lower(), folder.name), spec)
    if not options.json:
        print_table(Console(), rows, bench)
    if options.out is not None:
        record(
            options.out,
            rows,
            bench,
            {
                "runs": runs,
                "threads": options.threads,
                "model": folder.name,
                SPIN_COUNT: os.environ.get(SPIN_COUNT),
            },
        )
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    if SPIN_COUNT not in os.environ:  # read when torch loads, so it takes a new start
        os.execve(sys.executable, sys.orig_argv, {**os.environ, SPIN_COUNT: "5000"})
    main()
