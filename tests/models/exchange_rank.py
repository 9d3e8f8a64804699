"""A rank as a process: `python -m tests.models.exchange_rank`, with its order as JSON on stdin.

A rank above 0 gets a RankOrder. A rank 0 gets one without a rendezvous: it prints its address and serves
until stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch

from workers.config import GroupConfig
from workers.group_start import GroupStart
from workers.rank_host import FollowerHost, LeaderHost
from workers.runtime.order import RankOrder
from workers.types import GroupId, Role

SECRET = b"s" * 32


def group_start(config: GroupConfig, name: str) -> GroupStart:
    return GroupStart(
        config=config, group_id=GroupId(name), epoch=1, role=Role.UNIFIED, secret=SECRET, on_loopback=True
    )


async def lead(config: GroupConfig, name: str) -> None:
    """A group of one rank."""
    host = LeaderHost(group_start(config, name), host="127.0.0.1")
    await asyncio.to_thread(host.load)
    print(json.dumps(await host.listen()), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await host.stop("the test is over")


def main(name: str) -> None:
    torch.set_num_threads(1)
    order = RankOrder.from_json(sys.stdin.readline())
    if order.rank == 0:
        asyncio.run(lead(order.config, name))
        return
    follower = FollowerHost(group_start(order.config, name), order.rank, order.rendezvous)
    follower.load()
    follower.follow()


if __name__ == "__main__":
    main(sys.argv[1])
