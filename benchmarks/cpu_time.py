"""CPU time of the processes of a local cluster, by what they do."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from cluster.launch.marked import MARK, marked_processes

# Part of a process's command -> its name in tables; the first that fits.
_PARTS = (
    ("ServeReplica:tandem:router", "router"),
    ("ServeReplica:tandem:", "front"),
    ("RankActor", "rank 0"),
    ("haproxy", "HAProxy"),
    ("ServeController", "controller"),
    ("HAProxyManager", "proxy manager"),
)
_REST = "raylet, GCS, rest"


def mark_of_child(parent: int) -> str | None:
    """The mark of the cluster that a child of this process runs; None while there is none."""
    prefix = f"{MARK}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or not ours to read
            continue
        if int(stat[1]) == parent:
            for setting in environment:
                if setting.startswith(prefix):
                    return setting.removeprefix(prefix).decode()
    return None


def cpu_seconds(mark: str) -> dict[str, float]:
    """CPU seconds so far (10 ms exact) of a cluster's living processes, by name."""
    found: dict[str, float] = defaultdict(float)
    for pid in marked_processes(mark):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = next((name for part, name in _PARTS if part in command), _REST)
        found[name] += (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return dict(found)
