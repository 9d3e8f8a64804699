"""The same bits, however a step is run: by graph or operator, again, alone or with others."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu_check.driver import Driver, Run, config_of, prompts_of
from benchmarks.gpu_check.findings import check
from benchmarks.gpu_check.rival import write_checkpoint
from benchmarks.gpu_check.settings import Settings
from workers.types import SamplingParams


def check_repeats(settings: Settings) -> None:
    folder, _ = write_checkpoint("short", settings)
    tokens = settings.compared_tokens
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, num_logprobs=0)
    drawn = SamplingParams(
        max_tokens=tokens, temperature=0.8, top_p=0.9, top_k=50, seed=7, ignore_eos=True, num_logprobs=0
    )
    found: dict[bool, list[Run]] = {}
    for has_graphs in (True, False):
        with Driver(config_of(settings, folder, cuda_graphs=has_graphs, num_blocks=2048)) as driver:
            vocab_size = driver.group.facts.limits.vocab_size
            prompts = [prompts_of(9, n, vocab_size)[i] for i, n in enumerate((3, 20, 60) * 3)]
            runs = [driver.run(prompts, tokens, params) for params in (greedy, drawn)]
            again = [driver.run(prompts, tokens, params) for params in (greedy, drawn)]
            # Without log-probabilities, which the host has to see between two steps.
            bare = [replace(params, num_logprobs=None) for params in (greedy, drawn)]
            ahead = [driver.run(prompts, tokens, params) for params in bare]
            alone = [driver.run([prompt], tokens, greedy).answers[0] for prompt in prompts]
        name = "with graphs" if has_graphs else "by operator"
        check(f"{name}: a second run", runs == _untimed(again, runs))
        check(f"{name}: steps planned ahead", _token_ids(ahead) == _token_ids(runs))
        is_same = all(
            (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
            for a, b in zip(alone, runs[0].answers, strict=True)
        )
        # torch's products on a CPU are not bound to this.
        check(f"{name}: alone and in a batch", is_same or settings.is_dry)
        found[has_graphs] = runs
    check("graphs and operators", found[True] == _untimed(found[False], found[True]))


def _token_ids(runs: list[Run]) -> list[list[int]]:
    return [answer.token_ids for run in runs for answer in run.answers]


def _untimed(runs: list[Run], like: list[Run]) -> list[Run]:
    """The runs with the times of others: what is compared are tokens and log-probabilities."""
    for run, other in zip(runs, like, strict=True):
        run.decode_s = other.decode_s
        for answer, twin in zip(run.answers, other.answers, strict=True):
            answer.first_s = twin.first_s
    return runs
