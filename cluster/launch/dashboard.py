"""Wait for the dashboard of the Ray cluster that was started, and take no other for it.

Clusters of one user have one token, so another's dashboard at the same address lets us in, too. A session
knows itself by its name, which is that of a folder in its cluster's own temporary folder.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from cluster.launch.errors import LaunchError
from cluster.running.plain import without_colours
from cluster.running.serve_api import ServeApi, ServeApiError

_TAIL_LINES = 15  # of a log, in an error


class RayNotUp(LaunchError):
    """Ray did not come up, for a reason that another try need not meet."""


def wait_for_dashboard(
    api: ServeApi, head: subprocess.Popen[bytes], *, folder: Path, log: Path, timeout_s: float
) -> None:
    """Return when the cluster with this head process and temporary folder answers. Raises RayNotUp and
    LaunchError."""
    deadline = time.monotonic() + timeout_s
    while not _answers(api, folder):
        if head.poll() is not None:
            raise RayNotUp(f"Ray ended at once (code {head.returncode}):\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise LaunchError(f"Ray's dashboard did not answer in {timeout_s:.0f} s:\n{_tail(log)}")
        time.sleep(0.2)


def _answers(api: ServeApi, folder: Path) -> bool:
    """Whether the dashboard and its Serve module answer. Raises RayNotUp when it is another cluster's."""
    try:
        session = api.session()
    except ServeApiError:
        return False
    if not session.startswith("session_") or not (folder / Path(session).name).is_dir():
        raise RayNotUp(
            f"another Ray cluster has taken the port of the dashboard: {api.url} is of {session!r}"
        )
    return api.is_reachable()


def _tail(log: Path) -> str:
    """The last lines of a log."""
    text = without_colours(log.read_text(errors="replace"))
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
