"""Guessed tokens beside plain decoding: the same engine, model and prompts in turn, and the same answers.

    python -m benchmarks.speculation --model FOLDER [--methods prompt_lookup draft_model=FOLDER]
                                     [--batches 1 8 32] [--runs N] [--output FILE]

Prompts are of two kinds: `copy` asks for a text again (quoted, corrected, shortened), `chat` has questions.
At batch 1 each is answered alone. A larger batch stays full: as an answer ends another one begins, until
there are as many tokens as all of the first would have at most. Else guesses that bring some answers
forward would be measured by the wait for the longest.

Tokens a second of the whole engine, medians over the runs, and their ratio to plain decoding by the same
loaded model (where its weights lie makes a difference, too); tokens a step; the share of guesses that were
right. A busy machine makes the times worthless, not the counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

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
    """Answers to the prompts of a batch."""

    seconds: float
    answers: list[tuple[int, ...]]  # in the order of the prompts, and then of their beginning; some cut off
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
        """All prompts at once, with answers of `new_tokens` at most. Of several, one that has been answered
        makes room for the first ones again."""
        engine, before = self._engine, self._engine.stats()
        answers: dict[RequestId, list[int]] = {}
        running: set[RequestId] = set()
        left = len(prompts) * new_tokens
        started = perf_counter()
        while left > 0 and (len(prompts) > 1 or len(answers) == len(running)):
            while len(running) < len(prompts):
                running.add(self._ask(prompts[len(answers) % len(prompts)], new_tokens, answers))
            for chunk in engine.step():
                answers[chunk.request_id] += chunk.token_ids
                left -= len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    running.remove(chunk.request_id)
        seconds, after = perf_counter() - started, engine.stats()
        for name in running:
            engine.abort(name)
        while engine.has_work():
            engine.step()
        return Run(
            seconds=seconds,
            answers=[tuple(answer) for answer in answers.values()],
            num_steps=after.num_steps - before.num_steps,
            num_drafted=after.drafted_tokens_total - before.drafted_tokens_total,
            num_accepted=after.accepted_tokens_total - before.accepted_tokens_total,
        )

    def _ask(self, prompt: list[int], new_tokens: int, answers: dict[RequestId, list[int]]) -> RequestId:
        """Begins an answer, which is empty yet."""
        self._number += 1
        name = RequestId(f"bench-{self._number}")
        answers[name] = []
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0)
        self._engine.add(GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
        return name


class Pair(NamedTuple):
    """An engine that guesses, and one that does not, over one group."""

    name: str  # the method
    plain: Subject
    guessing: Subject


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
    tokenizer: Any = AutoTokenizer.from_pretrained(
        options.model, local_files_only=True, trust_remote_code=False
    )
    config = GroupConfig(
        model=ModelConfig(path=str(options.model), dtype="bfloat16"),
        cache=CacheConfig(max_bytes=1 << 30, prefix_reuse=False),
        schedule=ScheduleConfig(max_running=max(options.batches)),
        parallel=ParallelConfig(device="cpu", threads_per_rank=options.threads),
    )
    rows = []
    with ExitStack() as stack:
        shared = stack.enter_context(LocalGroup(config))
        plain = Subject(shared, config, SpeculativeConfig())
        pairs = []
        for wanted in options.methods:
            method, _, folder = wanted.partition("=")
            plan = SpeculativeConfig(method=method, model=folder, max_draft_tokens=options.max_draft_tokens)
            group, beside = shared, plain
            if folder:  # it lies beside a model of its own
                group = stack.enter_context(LocalGroup(replace(config, speculative=plan)))
                beside = Subject(group, config, SpeculativeConfig())
            pairs.append(Pair(wanted, beside, Subject(group, config, plan)))
        for kind, texts in _PROMPTS.items():
            chats = [[{"role": "user", "content": text}] for text in texts]
            prompts = [
                list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
                for chat in chats
            ]
            for batch in options.batches:
                for pair in pairs:
                    plain_runs, runs = _in_turn(pair, _batches(prompts, batch), options)
                    rows.append(_row(f"{kind} b{batch}", pair.name, runs, plain_runs))
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": facts(), "rows": rows}))


def _batches(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """Batch 1: each prompt alone; else the prompts as often as it takes."""
    if batch == 1:
        return [[prompt] for prompt in prompts]
    return [[prompts[index % len(prompts)] for index in range(batch)]]


def _in_turn(
    pair: Pair, batches: list[list[list[int]]], options: argparse.Namespace
) -> tuple[list[list[Run]], list[list[Run]]]:
    """The runs of all batches without guesses, and with them. Raises SystemExit when answers differ."""
    found: tuple[list[list[Run]], list[list[Run]]] = ([], [])
    for _ in range(options.runs):
        for runs, subject in zip(found, (pair.plain, pair.guessing), strict=True):
            runs.append([subject.run(batch, options.new_tokens) for batch in batches])
    for index in range(len(batches)):
        first = found[0][0][index].answers
        for runs in found:
            for each in runs:
                for answer, expected in zip(each[index].answers, first, strict=False):
                    length = min(len(answer), len(expected))
                    if answer[:length] != expected[:length]:
                        raise SystemExit(f"{pair.name} answers otherwise than plain decoding")
    return found


def _row(work: str, method: str, runs: list[list[Run]], plain: list[list[Run]]) -> dict[str, object]:
    """Prints and returns what guesses reached."""
    rate, plain_rate = _rate(runs), _rate(plain)
    all_runs = [run for each in runs for run in each]
    steps = sum(run.num_steps for run in all_runs)
    drafted, accepted = (
        sum(getattr(run, name) for run in all_runs) for name in ("num_drafted", "num_accepted")
    )
    row = {
        "work": work,
        "method": method,
        "plain_tokens_per_s": round(plain_rate, 1),
        "tokens_per_s": round(rate, 1),
        "ratio_to_plain": round(rate / plain_rate, 3),
        "tokens_per_step": round(sum(run.num_tokens for run in all_runs) / steps, 2),
        "accepted": round(accepted / drafted, 3) if drafted else None,
        "plain_seconds": _seconds(plain),
        "seconds": _seconds(runs),
    }
    print({name: value for name, value in row.items() if not name.endswith("seconds")}, flush=True)
    return row


def _seconds(runs: list[list[Run]]) -> list[list[float]]:
    return [[round(run.seconds, 4) for run in each] for each in runs]


def _rate(runs: list[list[Run]]) -> float:
    """Tokens a second, median over the runs; prompts included."""
    return statistics.median(
        sum(run.num_tokens for run in each) / sum(run.seconds for run in each) for each in runs
    )


if __name__ == "__main__":
    main()
