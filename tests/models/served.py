"""A family on a group of ranks, beside what transformers says to the graded prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.models import checkpoints
from tests.models.engine_groups import Client, start_group
from tests.models.oracle import Oracle
from workers.runtime.launch import LocalGroup

PROMPTS = checkpoints.graded_prompts()


@dataclass(frozen=True)
class Served:
    """The group, and the expected tokens of each of PROMPTS."""

    group: LocalGroup
    expected: list[list[int]]

    def client(self, **options: object) -> Client:
        return Client(self.group.facts, self.group.executor, **options)


@contextmanager
def serve(folder: Path, tensor_parallel: int) -> Iterator[Served]:
    oracle = Oracle(folder)
    expected = [oracle.greedy(prompt, checkpoints.NUM_GRADED_TOKENS) for prompt in PROMPTS]
    with start_group(folder, tensor_parallel) as group:
        yield Served(group, expected)
