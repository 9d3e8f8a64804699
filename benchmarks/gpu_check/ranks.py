"""Two ranks: what one says, and the end of the group when one of them is killed or stops.

On one GPU they share it and talk through the host, with gloo; on two or more by NCCL.
"""

from __future__ import annotations

import os
import signal
import time

from benchmarks.gpu_check.driver import Driver, config_of, prompts_of
from benchmarks.gpu_check.findings import check, figure
from benchmarks.gpu_check.model import distances
from benchmarks.gpu_check.rival import Rival, write_checkpoint
from benchmarks.gpu_check.settings import Settings
from workers.engine.step import GroupFailed
from workers.types import SamplingParams

_NUM_BLOCKS = 1024  # two pools may lie on one GPU


def check_ranks(settings: Settings) -> None:
    folder, rival = write_checkpoint("short", settings)
    _compare(folder, rival, settings)
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        _lose_a_rank(folder, settings, name, number)


def _compare(folder: str, rival: Rival, settings: Settings) -> None:
    tokens = settings.compared_tokens
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, num_logprobs=0)
    with Driver(config_of(settings, folder, tensor_parallel=2, num_blocks=_NUM_BLOCKS)) as driver:
        vocab_size = driver.group.facts.limits.vocab_size
        prompts = [prompts_of(3, n, vocab_size)[i] for i, n in enumerate((5, 33, 90))]
        run = driver.run(prompts, tokens, params)
    for prompt, answer in zip(prompts, run.answers, strict=True):
        gap, difference = distances(rival, prompt, answer.token_ids, answer.logprobs)
        check(
            f"two ranks: {tokens} tokens after {len(prompt)}",
            max(gap, difference) <= settings.tolerance,
            "against transformers",
            behind_best=gap,
            difference=difference,
        )


def _lose_a_rank(folder: str, settings: Settings, name: str, number: signal.Signals) -> None:
    driver = Driver(config_of(settings, folder, tensor_parallel=2, num_blocks=_NUM_BLOCKS))
    prompts = prompts_of(2, 8, driver.group.facts.limits.vocab_size)
    driver.run(prompts, 4)
    os.kill(driver.group.followers[0].pid, number)
    began = time.monotonic()
    said = ""
    try:
        driver.run(prompts, 32)
    except GroupFailed as error:
        said = str(error)
    seconds = time.monotonic() - began
    figure(f"a rank is {name}", seconds=seconds)
    limit_s = 2 * settings.step_timeout_s + 5
    check(f"a rank is {name}: the group ends", said != "" and seconds < limit_s, said or "it went on")
    driver.close()
