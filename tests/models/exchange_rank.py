"""Ranks as processes: `python -m tests.models.exchange_rank` forks one for every order, a line of JSON each.

Everything is imported once, before there is any thread, so that a rank costs milliseconds. A rank 0 says
where the others meet it, if there are others, then where it serves, and serves until SIGTERM. The others say
that they are there, before they meet it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict

import torch

from workers.config import GroupConfig
from workers.group_start import GroupStart
from workers.ranks.host import FollowerHost, LeaderHost
from workers.runtime.order import RankOrder
from workers.types import GroupId, Role

SECRET = b"s" * 32


def group_start(config: GroupConfig, name: str) -> GroupStart:
    return GroupStart(
        config=config, group_id=GroupId(name), epoch=1, role=Role.UNIFIED, secret=SECRET, on_loopback=True
    )


async def lead(config: GroupConfig, name: str) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    host = LeaderHost(group_start(config, name), host="127.0.0.1")
    if host.rendezvous is not None:
        say(asdict(host.rendezvous))
    await asyncio.to_thread(host.load)
    say(await host.listen())
    await over.wait()
    await host.stop("the test is over")


def follow(order: RankOrder, name: str) -> None:
    say("a rank above 0")
    follower = FollowerHost(group_start(order.config, name), order.rank, order.rendezvous)
    follower.load()
    follower.follow()


def say(what: object) -> None:
    print(json.dumps({"pid": os.getpid(), "says": what}), flush=True)


def serve() -> None:
    """Forks a rank for every line: the group's name, then the order."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are gone as soon as they end
    for line in sys.stdin:
        name, _, text = line.partition(" ")
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        order = RankOrder.from_json(text)
        if order.rank == 0:
            asyncio.run(lead(order.config, name))
        else:
            follow(order, name)
        os._exit(0)


if __name__ == "__main__":
    serve()
