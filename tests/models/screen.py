"""Finds seeds for `tests.models.families`: `python -m tests.models.screen [family ...]` prints them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils import logging

from tests.models import checkpoints
from tests.models.oracle import Oracle


def smallest_seed(entry: checkpoints.Family, limit: int = 400) -> int:
    """The first seed without a near tie at any graded step."""
    for seed in range(limit):
        with tempfile.TemporaryDirectory() as folder:
            oracle = Oracle(checkpoints.build(Path(folder), entry, seed=seed))
            if all(
                oracle.continuation(prompt, checkpoints.NUM_GRADED_TOKENS).margin >= 1.5 * checkpoints.MARGIN
                for prompt in checkpoints.graded_prompts()
            ):
                return seed
    raise SystemExit(f"{entry.name}: no seed below {limit} keeps the margin")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    wanted = sys.argv[1:]
    for entry in checkpoints.FAMILIES:
        if not wanted or entry.name in wanted:
            print(f"{entry.name}: seed {smallest_seed(entry)}", flush=True)
