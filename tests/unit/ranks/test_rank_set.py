"""Which rank is where and sees which GPUs, and whose words are told when ranks fail together."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError

from workers.group_start import RankPlace
from workers.ranks.rank_set import RankLost, all_ranks, gpus_to_share, side_by_side


async def says(value: Any, *, after_s: float = 0.0) -> Any:
    await asyncio.sleep(after_s)
    if isinstance(value, Exception):
        raise value
    return value


def failure_of(*calls: Awaitable[Any], wait_s: float) -> tuple[str, float]:
    """The message, and seconds until it came."""

    async def run() -> None:
        await all_ranks(calls, cause_wait_s=wait_s)

    began_at = time.monotonic()
    with pytest.raises(RankLost) as caught:
        asyncio.run(run())
    return str(caught.value), time.monotonic() - began_at


@pytest.mark.parametrize(
    ("nodes", "bundles"),
    [
        ("aaaa", [0, 1, 2, 3]),
        ("abab", [0, 2, 1, 3]),
        ("baab", [0, 3, 1, 2]),
        ("cabcab", [0, 3, 1, 4, 2, 5]),
        ("dcba", [0, 1, 2, 3]),
    ],
)
def test_ranks_of_a_machine_follow_each_other(nodes: str, bundles: list[int]) -> None:
    assert side_by_side(nodes) == bundles


@pytest.mark.parametrize(
    ("places", "seen"),
    [
        ([("a", ("2",)), ("a", ("0",))], ("2", "0")),
        ([("a", ("GPU-3f",)), ("a", ("GPU-1c",)), ("a", ("GPU-22",))], ("GPU-3f", "GPU-1c", "GPU-22")),
        ([("a", ("0",))], ()),
        ([("a", ("0",)), ("b", ("1",))], ()),
        ([("a", ()), ("a", ())], ()),
        ([("a", ("0",)), ("a", ("0",))], ()),
        ([("a", ("0", "1")), ("a", ("2", "3"))], ()),
        ([("a", ("MIG-1",)), ("a", ("MIG-2",))], ()),
    ],
)
def test_ranks_see_the_gpus_of_all_where_they_can_share_memory(
    places: list[tuple[str, tuple[str, ...]]], seen: tuple[str, ...]
) -> None:
    found = [RankPlace(pid=pid, node_id=node, gpus=gpus) for pid, (node, gpus) in enumerate(places)]
    assert gpus_to_share(found) == seen


def test_what_ranks_see_can_be_said_after_torch_is_there() -> None:
    """CUDA takes its devices from the environment when first asked: what a rank imports does not ask."""
    program = """
import torch

def ask(*_):
    raise AssertionError("asked for a CUDA device")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = ask
from workers.ranks import host
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_all_results_in_order_of_ranks() -> None:
    async def run() -> list[Any]:
        return await all_ranks([says("a", after_s=0.02), says("b")])

    assert asyncio.run(run()) == ["a", "b"]


def test_a_rank_that_goes_on_is_not_waited_for_longer_than_the_time() -> None:
    calls = (says("loaded", after_s=60.0), says(RayError("no memory")))
    message, seconds = failure_of(*calls, wait_s=0.3)
    assert message == "rank 1: no memory"
    assert 0.3 <= seconds < 10.0


def test_the_words_of_a_living_rank_come_before_the_silence_of_a_dead_one() -> None:
    calls = (says(RayError("rank 1 is not there"), after_s=0.1), says(ActorDiedError()))
    message, seconds = failure_of(*calls, wait_s=20.0)
    assert message == "rank 0: rank 1 is not there"
    assert seconds < 10.0  # all have spoken: no reason to wait on


def test_words_that_come_too_late_are_not_heard() -> None:
    calls = (says(RayError("late"), after_s=60.0), says(ActorDiedError()))
    message, seconds = failure_of(*calls, wait_s=0.1)
    assert message.startswith("the process of rank 1 is gone: ")
    assert seconds < 10.0
