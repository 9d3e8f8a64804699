"""Runs the tests of this folder in namespaces of their own: `python -m tests.rayup [arguments of pytest]`.

Everything happens inside: hosts are namespaces in these namespaces, their cables are links in this network,
their files are in memory. When the first process inside ends, however it ends, the kernel ends all others,
and networks, mounts and files go with them. This program looks afterwards whether that is so.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from cluster.launch.marked import MARK, marked_processes
from tests.rayup.tools import ToolsMissing, find_tools

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "tandem" / "rayup"
_TIME_LIMIT_S = 1800

# $0: the checkout, which stays where it is although /tmp becomes a new one; then the command.
_INSIDE = """
set -e
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/project
mount --rbind "$0" /mnt/project
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
test -d "$0" || { mkdir -p "$0" && mount --rbind /mnt/project "$0"; }
ip link set lo up
cd "$0"
exec "$@"
"""


def main() -> int:
    """Exit code of pytest; 2 when this machine cannot do it, 3 when something is left behind."""
    if os.geteuid() != 0:
        print("test-rayup makes namespaces and mounts: it must run as root", file=sys.stderr)
        return 2
    try:
        find_tools(CACHE)
    except ToolsMissing as error:
        print(f"test-rayup: {error}", file=sys.stderr)
        return 2
    mark = secrets.token_hex(8)
    apart = ["setpriv", "--pdeathsig", "KILL"]  # this program's end, however it comes, ends what it started
    apart += ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts"]
    apart += ["--fork", "--kill-child", "--mount-proc"]
    tests = [sys.executable, "-m", "pytest", "tests/rayup", "-m", "rayup", "-x", "-s", *sys.argv[1:]]
    started = time.monotonic()
    process = subprocess.Popen(
        [*apart, "sh", "-c", _INSIDE, str(ROOT), *tests], env={**os.environ, MARK: mark}, cwd=ROOT
    )
    try:
        code = process.wait(_TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"test-rayup: not done in {_TIME_LIMIT_S} s", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    finally:
        process.kill()
        process.wait(20)
    left = _left_behind(mark)
    print(f"test-rayup: {time.monotonic() - started:.0f} s; left behind: {', '.join(left) or 'nothing'}")
    return 3 if left and not code else code


def _left_behind(mark: str) -> list[str]:
    """Processes, links and mounts of ours."""
    deadline = time.monotonic() + 10.0
    while (pids := list(marked_processes(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    links = [entry.name for entry in Path("/sys/class/net").iterdir() if entry.name.startswith("rayup")]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [
        *(f"process {pid}" for pid in pids),
        *(f"link {link}" for link in links),
        *(f"mount {mount}" for mount in mounts if mount.startswith("/mnt/project")),
    ]


if __name__ == "__main__":
    sys.exit(main())
