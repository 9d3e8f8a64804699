"""Rank 0 of a real group as a process of its own, for tests that kill it.

`python -m tests.models.engine_leader FOLDER STEP_TIMEOUT_S idle|busy` prints one JSON line with the pids of
its followers once it serves, then computes steps or waits until stdin closes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.models.engine_groups import GREEDY, Client, group_config
from workers.runtime.launch import LocalGroup


def main(folder: Path, step_timeout_s: float, mode: str) -> None:
    with LocalGroup(group_config(folder, 2, step_timeout_s=step_timeout_s)) as group:
        print(json.dumps([process.pid for process in group.followers]), flush=True)
        client = Client(group.facts, group.executor)
        while mode == "busy":
            client.generate([[1, 2, 3], [4, 5]], GREEDY)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
