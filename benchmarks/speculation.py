"""Guessed tokens beside plain decoding: the same engine, model and prompts in turn, and the same answers.

    python -m benchmarks.speculation --model FOLDER [--methods prompt_lookup draft_model=FOLDER]
                                     [--batches 1 8 32] [--runs N] [--output FILE]

Prompts are of two kinds: `copy` asks for a text again (quoted, corrected, shortened), `chat` has questions.
Tokens a second of the whole engine, medians over the runs, and their ratio; tokens a step; the share of the
guesses that were right. A busy machine makes the times worthless, not the counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import AutoTokenizer

from benchmarks.spin import spin_briefly
from cluster.figures.machine import facts
from workers.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpeculativeConfig,
)
from workers.engine.engine import Engine
from workers.runtime.launch import LocalGroup
from workers.types import GenerateRequest, RequestId, SamplingParams

_TEXT = (
    "The harbour master kept a ledger of every ship that came in before the winter storms. Each line had "
    "the name of the vessel, the captain, the cargo and the hour at which the pilot had climbed aboard. In "
    "the last week of October the Marianne brought salt and tar, the Good Intent brought nothing but an "
    "empty hold, and the Saint Helena, three weeks late, brought forty barrels of oranges that had begun "
    "to spoil."
)
_WRONG = _TEXT.replace("every", "evry").replace("captain", "captian").replace("brought", "brougt")
_PROMPTS = {
    "copy": (
        f"Repeat the following text word for word.\n\n{_TEXT}",
        f"Correct the spelling of the following text and change nothing else.\n\n{_WRONG}",
        f"Quote the sentence of the following text that names the ships.\n\n{_TEXT}",
        f"Summarise the following text in two sentences, in its own words.\n\n{_TEXT}",
    ),
    "chat": (
        "Why is the sky blue?",
        "Give me five ideas for a birthday party in a small flat.",
        "Explain what a hash table is to somebody who knows how to use a dictionary.",
        "Write a short letter to a neighbour about a noisy dog.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch of answers."""

    seconds: float
    answers: list[tuple[int, ...]]
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)


class Subject:
    """An engine over the one group of this process."""

    def __init__(self, group: LocalGroup, config: GroupConfig, speculative: SpeculativeConfig) -> None:
        self._engine = Engine(
            limits=group.facts.limits,
            cache=config.cache,
            schedule=config.schedule,
            executor=group.executor,
            speculative=speculative,
        )
        self._number = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        """All prompts at once."""
        engine, before = self._engine, self._engine.stats()
        answers: dict[RequestId, list[int]] = {}
        for prompt in prompts:
            self._number += 1
            name = RequestId(f"bench-{self._number}")
            answers[name] = []
            sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0)
            engine.add(GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
        started = perf_counter()
        while engine.has_work():
            for chunk in engine.step():
                answers[chunk.request_id] += chunk.token_ids
        seconds, after = perf_counter() - started, engine.stats()
        return Run(
            seconds=seconds,
            answers=[tuple(answer) for answer in answers.values()],
            num_steps=after.num_steps - before.num_steps,
            num_drafted=after.drafted_tokens_total - before.drafted_tokens_total,
            num_accepted=after.accepted_tokens_total - before.accepted_tokens_total,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--methods", nargs="+", default=["prompt_lookup"], metavar="METHOD[=FOLDER]")
    parser.add_argument("--max-draft-tokens", type=int, default=SpeculativeConfig().max_draft_tokens)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="where all runs go, as JSON")
    options = parser.parse_args()
    spin_briefly()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    config = GroupConfig(
        model=ModelConfig(path=str(options.model), dtype="bfloat16"),
        cache=CacheConfig(max_bytes=1 << 30, prefix_reuse=False),
        schedule=ScheduleConfig(max_running=max(options.batches)),
        parallel=ParallelConfig(device="cpu", threads_per_rank=options.threads),
    )
    rows = []
    plans = {"none": SpeculativeConfig()}
    for wanted in options.methods:
        method, _, folder = wanted.partition("=")
        plans[wanted] = SpeculativeConfig(
            method=method, model=folder, max_draft_tokens=options.max_draft_tokens
        )
    with ExitStack() as stack:
        shared = stack.enter_context(LocalGroup(config))
        subjects = {}
        for name, plan in plans.items():
            group = shared
            if plan.model:  # it lies beside a model of its own
                group = stack.enter_context(LocalGroup(replace(config, speculative=plan)))
            subjects[name] = Subject(group, config, plan)
        for kind, texts in _PROMPTS.items():
            chats = [[{"role": "user", "content": text}] for text in texts]
            prompts = [
                list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
                for chat in chats
            ]
            for batch in options.batches:
                found = _in_turn(subjects, _batches(prompts, batch), options)
                rows += [_row(kind, batch, method, runs, found["none"]) for method, runs in found.items()]
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": facts(), "rows": rows}))


def _batches(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """Batch 1: each prompt alone; else the prompts as often as it takes."""
    if batch == 1:
        return [[prompt] for prompt in prompts]
    return [[prompts[index % len(prompts)] for index in range(batch)]]


def _in_turn(
    subjects: dict[str, Subject], batches: list[list[list[int]]], options: argparse.Namespace
) -> dict[str, list[list[Run]]]:
    """Of each subject, its runs of all batches. Raises SystemExit when answers differ."""
    found: dict[str, list[list[Run]]] = {name: [] for name in subjects}
    for _ in range(options.runs):
        for name, subject in subjects.items():
            found[name].append([subject.run(batch, options.new_tokens) for batch in batches])
    expected = [run.answers for run in found["none"][0]]
    for name, runs in found.items():
        for each in runs:
            if [run.answers for run in each] != expected:
                raise SystemExit(f"{name} answers otherwise than plain decoding")
    return found


def _row(
    kind: str, batch: int, method: str, runs: list[list[Run]], plain: list[list[Run]]
) -> dict[str, object]:
    """Prints and returns what one subject reached."""
    rate, plain_rate = _rate(runs), _rate(plain)
    all_runs = [run for each in runs for run in each]
    steps = sum(run.num_steps for run in all_runs)
    drafted, accepted = (
        sum(getattr(run, name) for run in all_runs) for name in ("num_drafted", "num_accepted")
    )
    row = {
        "work": f"{kind} b{batch}",
        "method": method,
        "tokens_per_s": round(rate, 1),
        "ratio_to_plain": round(rate / plain_rate, 3),
        "tokens_per_step": round(sum(run.num_tokens for run in all_runs) / steps, 2),
        "accepted": round(accepted / drafted, 3) if drafted else None,
        "seconds": [[round(run.seconds, 4) for run in each] for each in runs],
    }
    print({name: value for name, value in row.items() if name != "seconds"}, flush=True)
    return row


def _rate(runs: list[list[Run]]) -> float:
    """Tokens a second, median over the runs; prompts included."""
    return statistics.median(
        sum(run.num_tokens for run in each) / sum(run.seconds for run in each) for each in runs
    )


if __name__ == "__main__":
    main()
