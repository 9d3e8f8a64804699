"""Two ranks, two processes, that map each other's pools: when they do, and that answers are the same."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.engine_groups import Client, start_group
from workers.kernels import load_library
from workers.runtime.launch import LocalGroup


def pools_of(pid: int | str) -> set[str]:
    """Inodes of the shared pools that a process maps; those of groups that have ended are gone."""
    gc.collect()
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r" (\d+) +/memfd:tandem-pool", maps))


def answers(group: LocalGroup) -> list[list[int]]:
    prompts = checkpoints.graded_prompts()
    client = Client(group.facts, group.executor, max_step_tokens=40)
    return [answer.token_ids for answer in client.generate(prompts)]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_two_ranks_map_both_pools_and_say_the_same(
    kv_dtype: str, family_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    if not load_library().has_linear:
        pytest.skip("this CPU has no fused step")
    folder = family_folder("llama")
    with start_group(folder, 1, dtype="bfloat16", kv_dtype=kv_dtype) as alone:
        assert pools_of("self") == set()
        wanted = answers(alone)
    caplog.set_level(logging.WARNING)
    with start_group(folder, 2, dtype="bfloat16", kv_dtype=kv_dtype) as group:
        (follower,) = group.followers
        assert len(pools_of("self")) == 2
        assert pools_of("self") == pools_of(follower.pid)
        assert answers(group) == wanted
    del group
    assert pools_of("self") == set()
    assert caplog.messages == []


def test_ranks_without_a_fused_step_keep_their_pools_to_themselves(
    family_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with start_group(family_folder("llama"), 2, dtype="float32") as group:
        (follower,) = group.followers
        assert pools_of("self") == pools_of(follower.pid) == set()
    assert caplog.messages == []
