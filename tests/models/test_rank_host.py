"""Rank 0's process without Ray: what its clients hear when another rank is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.engine_groups import group_config
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.submit import SubmitClient
from workers.engine.loop import EngineLoop
from workers.group_start import GroupStart
from workers.ranks.host import LeaderHost
from workers.runtime.launch import start_follower
from workers.runtime.order import RankOrder
from workers.types import GroupId, Role

TIMEOUT_S = 2.0
SECRET = b"s" * 32


@pytest.mark.parametrize(
    ("fault", "within_s", "words"),
    [(signal.SIGKILL, 0.5, "died"), (signal.SIGSTOP, TIMEOUT_S + 1.0, "silent")],
)
def test_clients_hear_of_a_lost_rank_before_the_process_ends(
    family_folder: Callable[[str], Path], fault: signal.Signals, within_s: float, words: str
) -> None:
    """The group is idle: the engine's thread, which waits for work, learns nothing and says nothing."""
    config = group_config(family_folder("llama"), 2, step_timeout_s=TIMEOUT_S)
    ended = threading.Event()

    async def run() -> tuple[str, str, float, int]:
        start = GroupStart(
            config=config, group_id=GroupId("g"), epoch=1, role=Role.UNIFIED, secret=SECRET, on_loopback=True
        )
        host = LeaderHost(start, host="127.0.0.1", end_process=lambda reason: ended.set())
        assert host.rendezvous is not None
        follower = start_follower(RankOrder(config=config, rank=1, rendezvous=host.rendezvous))
        try:
            await asyncio.to_thread(host.load)
            address = await host.listen()
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            identity = ClientIdentity(client_id="front", secret=SECRET, subscribes=False)
            client = SubmitClient(identity, on_lost=lost.set_result)
            await client.connect(*address)
            os.kill(follower.pid, fault)
            began = time.monotonic()
            heard = await asyncio.wait_for(lost, 10.0)
            took_s = time.monotonic() - began
            reason = await asyncio.wait_for(host.ended(), 1.0)
            await asyncio.to_thread(ended.wait, 5.0)
            await host.stop("the test is over")
            return heard, reason, took_s, follower.pid
        finally:
            follower.kill()
            await asyncio.to_thread(follower.wait, 5.0)

    heard, reason, took_s, pid = asyncio.run(run())
    assert ended.is_set()
    assert heard == reason
    assert f"rank 1 (pid {pid})" in heard and words in heard
    assert took_s < within_s


def test_the_other_ranks_end_though_a_part_of_rank_0_fails_to(
    family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = group_config(family_folder("llama"), 2, step_timeout_s=TIMEOUT_S)

    stop = EngineLoop.stop

    def stop_and_fail(loop: EngineLoop, timeout_s: float) -> None:
        stop(loop, timeout_s)
        raise RuntimeError("the engine did not end")

    async def run() -> None:
        start = GroupStart(
            config=config, group_id=GroupId("g"), epoch=1, role=Role.UNIFIED, secret=SECRET, on_loopback=True
        )
        host = LeaderHost(start, host="127.0.0.1", end_process=lambda reason: None)
        assert host.rendezvous is not None
        follower = start_follower(RankOrder(config=config, rank=1, rendezvous=host.rendezvous))
        try:
            await asyncio.to_thread(host.load)
            await host.listen()
            with monkeypatch.context() as broken:
                broken.setattr(EngineLoop, "stop", stop_and_fail)
                with pytest.raises(RuntimeError, match="did not end"):
                    await host.stop("the test is over")
            assert await asyncio.to_thread(follower.wait, 5.0) == 0  # it was told to
        finally:
            follower.kill()
            await asyncio.to_thread(follower.wait, 5.0)

    asyncio.run(run())
