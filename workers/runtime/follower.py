"""A follower as a process: `python -m workers.runtime.follower`, with its order as JSON on stdin."""

from __future__ import annotations

import sys

from workers.runtime.order import RankOrder
from workers.runtime.rank import Follower, exit_process


def main(order_json: str) -> None:
    """From an order to the end of its group. A fault ends the process with EXIT_CODE and its reason."""
    order = RankOrder.from_json(order_json)
    follower = Follower(order.config, order.rank, order.rendezvous)
    try:
        follower.load()
        follower.follow()
    except Exception as error:
        # Leaving the process group in order would wait for ranks that may be dead.
        exit_process(f"rank {order.rank}: {type(error).__name__}: {error}")
    follower.close()


if __name__ == "__main__":
    main(sys.stdin.read())
