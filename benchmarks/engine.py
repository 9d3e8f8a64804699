"""Our engine against others on one machine, in turn, with the machine's ceilings beside.

    python -m benchmarks.engine [--model FOLDER] [--formats bf16,int8] [--sweep] [--runs N] [--quick]
                                [--peers NAMES] [--json] [--out FILE]

Peers: transformers, and those that `make bench-peers` has set up. Every run measures every work on every
subject, one after the other, with fresh random prompts; a figure is made of the median times over the runs.
A format is measured after the other; its rows compare only peers with weights of that format. Each
measurement is told on stderr as it ends, and so is every peer that is left out, with the reason. The last
line of output is JSON: {"rows": [{"work", "ours", "unit", "best_peer", "peer", "ratio_to_best_peer", "limit",
"limit_share"}, ...]}; a ratio above 1 is ahead in every unit. Quote only runs on a quiet machine: other
programs slow the peers more than us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.peers.catalogue import CATALOGUE, default_root
from benchmarks.peers.process import PeerProcess
from benchmarks.report import Row, print_table, record
from benchmarks.spin import SPIN_COUNT, spin_briefly
from benchmarks.subjects import Subject, SubjectFailed, Tandem, Transformers
from benchmarks.works import WEIGHT_FORMATS, Kind, WeightFormat, Work, limit, standard_works, sweep_works
from cluster.bench.roofs import RoofMeter
from cluster.models.embedded import ensure
from workers.model.architecture import ModelSpec
from workers.model.checkpoint import Checkpoint
from workers.model.spec import spec_from_config

MODEL_NAMES = {"smollm2-135m-instruct": "smollm2", "random-qwen2-0.5b": "qwen2-0.5b"}  # folder -> in the rows
OURS = "tandem"
MAX_TRIES = 5
TRANSFORMERS = "transformers"

Tell = Callable[[str], None]


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
        """Measures every work once on every subject, in turn; yields a line about each as it ends.

        A peer that fails is left out from then on.
        """
        for number, work in enumerate(self._works):
            for name, subject in list(self._subjects.items()):
                self.meter.sample()  # of many samples the best is near the ceiling
                try:
                    first, last = self._measure(work, subject)
                except SubjectFailed as error:
                    yield self._leave_out(name, error)
                    continue
                self.samples[number][name].append((first, last))
                yield f"{work.label}: {name} {work.figure(first, last):.1f} {work.unit}"

    def warm_up(self) -> Iterator[str]:
        """Touches memory and code of every subject once, untimed; yields a line about each that fails."""
        for name, subject in list(self._subjects.items()):
            try:
                subject.generate([self._prompt(32)] * 2, 4)
            except SubjectFailed as error:
                yield self._leave_out(name, error)

    def figures(self, number: int) -> dict[str, float]:
        """What each subject reached in a work, from the medians of its seconds."""
        work, found = self._works[number], self.samples[number]
        return {
            name: work.figure(*(statistics.median(column) for column in zip(*pairs, strict=True)))
            for name, pairs in found.items()
            if pairs
        }

    def _leave_out(self, name: str, error: SubjectFailed) -> str:
        if name == OURS:
            raise error
        del self._subjects[name]
        return f"LEFT OUT from here on: {error}"

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


def rows_of(bench: Bench, works: list[Work], model: str, spec: ModelSpec, weights: WeightFormat) -> list[Row]:
    """Medians, the better peer of each work, and the share of the limit. A work without peers has no row."""
    roofs = bench.meter.roofs()
    rows: list[Row] = []
    for number, work in enumerate(works):
        figures = bench.figures(number)
        ours = figures.pop(OURS)
        if not figures:
            continue
        peer = min(figures, key=lambda name: work.times_better(ours, figures[name]))
        ceiling = limit(work, spec, weights, roofs)
        rows.append(
            {
                "work": work.name(model, weights.name),
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


def open_subjects(
    folder: Path,
    weights: str,
    names: Sequence[str],
    threads: int,
    max_running: int,
    stack: ExitStack,
    tell: Tell,
) -> dict[str, Subject]:
    """Ours and the peers of a weight format, loaded; `stack` closes them. Peers left out are told."""
    quantization = "none" if weights == "bf16" else weights
    ours = Tandem(folder, threads, max_running, quantization)
    subjects: dict[str, Subject] = {OURS: stack.enter_context(closing(ours))}
    if TRANSFORMERS in names and weights == "bf16":
        for cache in ("dynamic", "static"):
            subjects[f"{TRANSFORMERS} {cache} cache"] = Transformers(folder, cache)
    root = default_root()
    for name in names:
        kind = CATALOGUE.get(name)
        if kind is None or weights not in kind.labels:
            continue
        if not kind.is_installed(root):
            tell(f"LEFT OUT: {kind.labels[weights]} is not set up; `make bench-peers` does that")
            continue
        tell(f"loading {kind.labels[weights]}")
        try:
            peer = stack.enter_context(closing(PeerProcess(kind, root, folder, weights, threads)))
        except SubjectFailed as error:
            tell(f"LEFT OUT: {error}")
            continue
        subjects[kind.labels[weights]] = peer
    return subjects


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="folder in Hugging Face layout; default: the embedded model"
    )
    parser.add_argument(
        "--formats", default="bf16", help=f"of weights: {', '.join(WEIGHT_FORMATS)}; default: bf16"
    )
    parser.add_argument(
        "--peers",
        default=",".join((TRANSFORMERS, *CATALOGUE)),
        help="those to compare with, if they are there; default: %(default)s",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="batch sizes 1 to 128 after prompts of 512, only"
    )
    parser.add_argument("--runs", type=int, help="samples of every figure; default 5, or 1 with --quick")
    parser.add_argument(
        "--quick", action="store_true", help="short decodes, one run: does it work, roughly how fast"
    )
    parser.add_argument("--json", action="store_true", help="no table on stdout, only the JSON line")
    parser.add_argument("--out", type=Path, help="file for commit, machine and all samples")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    options.formats, options.peers = options.formats.split(","), options.peers.split(",")
    if unknown := set(options.formats) - set(WEIGHT_FORMATS):
        parser.error(
            f"--formats: no format {', '.join(sorted(unknown))}; there are {', '.join(WEIGHT_FORMATS)}"
        )
    if unknown := set(options.peers) - {TRANSFORMERS, *CATALOGUE}:
        parser.error(
            f"--peers: no peer {', '.join(sorted(unknown))}; there are {TRANSFORMERS}, {', '.join(CATALOGUE)}"
        )
    return options


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    new_tokens = 16 if options.quick else 64
    works = sweep_works(new_tokens) if options.sweep else standard_works(new_tokens)
    runs = options.runs or (1 if options.quick else 5)
    folder = options.model or ensure(Console(stderr=True).print)
    spec = spec_from_config(Checkpoint(folder).config)
    model = MODEL_NAMES.get(folder.name.lower(), folder.name)
    started = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {line}", file=sys.stderr, flush=True)

    meter = RoofMeter()
    rows: list[Row] = []
    samples: dict[str, object] = {}
    for weights in options.formats:
        with ExitStack() as stack:
            tell(f"loading {OURS} {weights}")
            largest = max(work.batch for work in works)
            subjects = open_subjects(folder, weights, options.peers, options.threads, largest, stack, tell)
            bench = Bench(subjects, works, spec.vocab_size, meter)
            tell("warming up")
            for line in bench.warm_up():
                tell(line)
            for run in range(runs):
                for line in bench.run():
                    tell(f"run {run + 1} of {runs}: {line}")
        rows += rows_of(bench, works, model, spec, WEIGHT_FORMATS[weights])
        samples[weights] = [bench.samples[number] for number in sorted(bench.samples)]
    if not options.json:
        print_table(Console(), rows, meter.roofs())
    if options.out is not None:
        settings = {
            "runs": runs,
            "threads": options.threads,
            "model": folder.name,
            "works": [work.label for work in works],
            SPIN_COUNT: os.environ.get(SPIN_COUNT),
        }
        record(options.out, rows, samples, meter.samples(), settings)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    spin_briefly()
    main()
