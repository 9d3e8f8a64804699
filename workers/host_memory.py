"""How much memory there is to take, as the kernel and the container see it."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that this process can still take without swapping: the least of machine and container."""
    return min([_machine_bytes(meminfo), *_container_bytes(cgroup)])


def _machine_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{meminfo} has no MemAvailable line; set cache.num_blocks")


def _container_bytes(cgroup: Path) -> list[int]:
    """What is left of the limit of a control group, version 2 or 1; empty without a limit."""
    version_2 = cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"
    first = cgroup / "memory"
    version_1 = first / "memory.limit_in_bytes", first / "memory.usage_in_bytes", first / "memory.stat"
    found = []
    for limit, usage, stat in (version_2, version_1):
        if limit.exists() and usage.exists() and (text := limit.read_text().strip()) != "max":
            # Pages of the file cache that are not in use are given back under pressure.
            found.append(max(0, int(text) - int(usage.read_text()) + _inactive_file_bytes(stat)))
    return found


def _inactive_file_bytes(stat: Path) -> int:
    if stat.exists():
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0
