"""What the two trainings have in common on the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from workers.engine.step import GroupFailed
from workers.model.errors import CheckpointError
from workers.progress import Progress
from workers.training.material import Material, Plan, prepare
from workers.training.prompts import TextError


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Options of `Plan`, and where the result goes."""
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--work", type=Path, help="folder that keeps text and states; default: OUT-work")
    parser.add_argument(
        "--prompts", type=at_least_one, default=520, help="made from templates; a tenth is held out"
    )
    parser.add_argument(
        "--own-prompts", type=at_least_none, default=960, help="times that the model is asked for a prompt"
    )
    parser.add_argument("--max-tokens", type=at_least_one, default=256, help="longest answer")
    parser.add_argument(
        "--vocabulary", type=at_least_one, default=8192, help="tokens that guesses are made of"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=at_least_one, default=os.cpu_count() or 1)


def at_least_one(text: str) -> int:
    """A type of options. Raises ArgumentTypeError."""
    return _at_least(1, text)


def at_least_none(text: str) -> int:
    """Likewise."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return number


def run_training(options: argparse.Namespace, work: Callable[[Material, Progress], None]) -> int:
    """Has `work` done over the material that the options name. Returns the exit code."""
    torch.set_num_threads(options.threads)
    plan = Plan(
        folder=options.model.expanduser(),
        work=options.work or options.out.with_name(f"{options.out.name}-work"),
        seed=options.seed,
        num_prompts=options.prompts,
        num_asked=options.own_prompts,
        max_tokens=options.max_tokens,
        vocabulary=options.vocabulary,
        threads=options.threads,
    )
    with Progress(sys.stderr) as progress:
        try:
            work(prepare(plan, progress), progress)
        except (CheckpointError, GroupFailed, TextError, ValueError, OSError) as error:
            progress.end(f"error: {error}")
            return 1
        progress.end()
    return 0
