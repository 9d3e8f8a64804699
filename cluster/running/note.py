"""A note of the cluster that `tandem serve` runs, so that the other commands of this user find it.

One small JSON file in the user's cache, readable by the owner only, written when the API is up and removed
at the end. A note whose process is gone counts as absent; a process is known by id and start time, since the
id alone may long belong to somebody else.
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
    """The note in a folder of its own; one process writes, many read."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "running.json"

    def write(self, cluster: RunningCluster) -> None:
        """Replace the note in one step. Raises OSError."""
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._file, json.dumps(asdict(cluster), indent=2), mode=0o600)

    def read(self) -> RunningCluster | None:
        """The cluster, or None when none runs or the note is not readable."""
        try:
            cluster = RunningCluster(**json.loads(self._file.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        is_alive = cluster.process_start == process_start(cluster.pid)
        return cluster if is_alive else None

    def mark_stopping(self, pid: int) -> None:
        """Say that the cluster is being stopped, if the note is of that process. Best effort."""
        cluster = self.read()
        if cluster is not None and cluster.pid == pid:
            with contextlib.suppress(OSError):
                self.write(replace(cluster, is_stopping=True))

    def remove(self, pid: int) -> None:
        """Remove the note if it is of that process; a newer one stays."""
        cluster = self.read()
        if cluster is not None and cluster.pid == pid:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()


def default_folder() -> Path:
    """Where notes and locks of this user are."""
    return Path.home() / ".cache" / "tandem" / "run"
