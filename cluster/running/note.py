"""Notes of the clusters that `tandem serve` runs, so that the other commands of this user find them.

One small JSON file for each in the user's cache, readable by the owner only, written when the API is up and
removed at the end. A note whose process is gone counts as absent; a process is known by id and start time,
since the id alone may long belong to somebody else.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.running.process import process_start
from cluster.whole_file import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """Where a running `tandem serve` can be reached."""

    pid: int  # of the `tandem serve` process
    dashboard_url: str
    gcs_address: str
    api_url: str
    application: str
    file: str  # the deployment file it was started with
    process_start: int  # clock ticks from the machine's start to that of the process
    api_keys_file: str = ""  # a key of it is needed; empty: none is
    is_stopping: bool = False


class RunningNote:
    """The notes in a folder of their own; each process writes its own, many read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, cluster: RunningCluster) -> None:
        """Replace the note of a process in one step, and clear away those left behind. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in self._folder.glob("running-*.json"):
            if _read(file) is None:
                file.unlink(missing_ok=True)
        replace_file(self._file(cluster.pid), json.dumps(asdict(cluster), indent=2), mode=0o600)

    def all(self) -> list[RunningCluster]:
        """All clusters that run, the one started last first. Notes that are not readable count as absent."""
        found = [_read(file) for file in self._folder.glob("running-*.json")]
        clusters = [cluster for cluster in found if cluster is not None]
        return sorted(clusters, key=lambda cluster: (cluster.process_start, cluster.pid), reverse=True)

    def read(self) -> RunningCluster | None:
        """The cluster started last, or None when none runs."""
        return next(iter(self.all()), None)

    def at(self, dashboard_url: str) -> RunningCluster | None:
        """The cluster with this dashboard, or None when none of them runs it."""
        return next((cluster for cluster in self.all() if cluster.dashboard_url == dashboard_url), None)

    def mark_stopping(self, pid: int) -> None:
        """Say that the cluster of a process is being stopped. Best effort."""
        cluster = _read(self._file(pid))
        if cluster is not None:
            with contextlib.suppress(OSError):
                self.write(replace(cluster, is_stopping=True))

    def remove(self, pid: int) -> None:
        """Remove the note of a process. Best effort: one that stays counts as absent."""
        with contextlib.suppress(OSError):
            self._file(pid).unlink()

    def _file(self, pid: int) -> Path:
        return self._folder / f"running-{pid}.json"


def _read(file: Path) -> RunningCluster | None:
    try:
        cluster = RunningCluster(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return cluster if cluster.process_start == process_start(cluster.pid) else None


def default_folder() -> Path:
    """Where notes and locks of this user are."""
    return Path.home() / ".cache" / "tandem" / "run"
