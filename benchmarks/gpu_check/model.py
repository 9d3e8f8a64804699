"""A whole model: the tokens and logits of transformers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_check.driver import Driver, config_of, prompts_of
from benchmarks.gpu_check.findings import check, figure
from benchmarks.gpu_check.rival import Rival, write_checkpoint
from benchmarks.gpu_check.settings import Settings
from benchmarks.gpu_check.speed import measure_speed
from workers.types import SamplingParams


def check_model(name: str, settings: Settings) -> None:
    """name: of a shape, or `model` for the given folder. The speed of llama too."""
    if name == "model":
        folder, rival = settings.model, Rival.of_folder(settings.model, settings)
    else:
        folder, rival = write_checkpoint(name, settings)
    with Driver(config_of(settings, folder)) as driver:
        facts = driver.group.facts
        figure(
            f"{name}: pool",
            num_blocks=facts.num_blocks,
            gib=facts.num_blocks * facts.kv_bytes_per_block / 2**30,
        )
        compare(name, driver, rival, settings)
        if name == "llama":
            measure_speed(folder, driver, rival, settings)


def compare(name: str, driver: Driver, rival: Rival, settings: Settings) -> None:
    """Greedy answers in one batch: each token is transformers' best or ties with it, with its score."""
    limits = driver.group.facts.limits
    lengths = [n for n in settings.compared_prompts if n + settings.compared_tokens <= limits.max_model_len]
    prompts = [prompts_of(1, length, limits.vocab_size)[0] for length in lengths]
    params = SamplingParams(
        max_tokens=settings.compared_tokens, temperature=0.0, ignore_eos=True, num_logprobs=0
    )
    run = driver.run(prompts, settings.compared_tokens, params)
    for prompt, answer in zip(prompts, run.answers, strict=True):
        gap, difference = distances(rival, prompt, answer.token_ids, answer.logprobs)
        check(
            f"{name}: {len(answer.token_ids)} tokens after {len(prompt)}",
            max(gap, difference) <= settings.tolerance,
            f"at most {settings.tolerance:g} of a log-probability from transformers",
            behind_best=gap,
            difference=difference,
        )


def distances(
    rival: Rival, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]
) -> tuple[float, float]:
    """The most that a token is behind transformers' best one, and that its score is from transformers'."""
    wanted = rival.logprobs([*prompt, *token_ids[:-1]], len(token_ids))
    own = wanted[range(len(token_ids)), list(token_ids)]
    gap = float((wanted.amax(-1) - own).max())
    difference = max(abs(float(a) - b) for a, b in zip(own, logprobs, strict=True))
    return gap, difference
