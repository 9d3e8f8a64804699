"""Two ranks: what one says, and the end of the group when one of them is killed or stops.

On one GPU they share it and talk through the host, with gloo; on two or more they add up in symmetric memory,
and by NCCL, which has to give the same of two ranks. On four or more GPUs four ranks show that a row does not
depend on its batch.
"""

from __future__ import annotations

import os
import signal
import time
from statistics import median

import torch

from benchmarks.gpu_check.driver import Driver, Run, config_of, prompts_of
from benchmarks.gpu_check.findings import check, figure
from benchmarks.gpu_check.model import distances
from benchmarks.gpu_check.rival import Rival, write_checkpoint
from benchmarks.gpu_check.settings import Settings
from workers.engine.step import GroupFailed
from workers.types import SamplingParams

_NUM_BLOCKS = 1024  # two pools may lie on one GPU


def check_ranks(settings: Settings) -> None:
    folder, rival = write_checkpoint("short", settings)
    run, is_symmetric = _compare(folder, rival, settings)
    if settings.is_dry or torch.cuda.device_count() > 1:
        _without_symmetric_memory(folder, settings, run, is_symmetric=is_symmetric)
    if torch.cuda.device_count() >= 4:
        _alone_and_in_a_batch(folder, settings)
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        _lose_a_rank(folder, settings, name, number)


def _compare(folder: str, rival: Rival, settings: Settings) -> tuple[Run, bool]:
    """Also whether the ranks added up in symmetric memory."""
    tokens = settings.compared_tokens
    with Driver(config_of(settings, folder, tensor_parallel=2, num_blocks=_NUM_BLOCKS)) as driver:
        prompts = _prompts(driver)
        run = driver.run(prompts, tokens, _params(settings))
        is_symmetric = driver.group.is_symmetric
    for prompt, answer in zip(prompts, run.answers, strict=True):
        gap, difference = distances(rival, prompt, answer.token_ids, answer.logprobs)
        check(
            f"two ranks: {tokens} tokens after {len(prompt)}",
            max(gap, difference) <= settings.tolerance,
            "against transformers",
            behind_best=gap,
            difference=difference,
        )
    return run, is_symmetric


def _without_symmetric_memory(folder: str, settings: Settings, run: Run, *, is_symmetric: bool) -> None:
    """run, is_symmetric: of `_compare`."""
    config = config_of(settings, folder, symmetric_memory=False, tensor_parallel=2, num_blocks=_NUM_BLOCKS)
    with Driver(config) as driver:
        other = driver.run(_prompts(driver), settings.compared_tokens, _params(settings))
    way = "symmetric memory" if is_symmetric else "no symmetric memory (rank 0 says why)"
    check(f"two ranks: {way}, and NCCL by config", _said(run) == _said(other))
    figure(
        f"two ranks: a decode step with {way}, and by NCCL, ms",
        first=1e3 * median(run.decode_s),
        nccl=1e3 * median(other.decode_s),
    )


def _alone_and_in_a_batch(folder: str, settings: Settings) -> None:
    with Driver(config_of(settings, folder, tensor_parallel=4, num_blocks=_NUM_BLOCKS)) as driver:
        prompts, tokens, params = _prompts(driver), settings.compared_tokens, _params(settings)
        together = _said(driver.run(prompts, tokens, params))
        alone = [_said(driver.run([prompt], tokens, params))[0] for prompt in prompts]
    check("four ranks: alone and in a batch", alone == together)


def _prompts(driver: Driver) -> list[list[int]]:
    vocab_size = driver.group.facts.limits.vocab_size
    return [prompts_of(3, n, vocab_size)[i] for i, n in enumerate((5, 33, 90))]


def _params(settings: Settings) -> SamplingParams:
    return SamplingParams(
        max_tokens=settings.compared_tokens, temperature=0.0, ignore_eos=True, num_logprobs=0
    )


def _said(run: Run) -> list[tuple[list[int], list[float]]]:
    return [(answer.token_ids, answer.logprobs) for answer in run.answers]


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
