"""Which file was deployed last on a cluster, and with which changes on the command line: so that
`tandem scale` needs no file, and does not undo them.

A small JSON file for each cluster in the user's cache. Written when a deployment was accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.whole_file import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedFile:
    """What `tandem serve` or `tandem deploy` was given."""

    file: str  # absolute
    assignments: tuple[str, ...] = ()  # --set
    port: int | None = None  # --port


class DeployedFiles:
    """The notes, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, dashboard_url: str, file: str, assignments: Sequence[str], port: int | None) -> None:
        """Replace the note of a cluster in one step. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        note = DeployedFile(file=os.path.abspath(file), assignments=tuple(assignments), port=port)
        replace_file(self._place(dashboard_url), json.dumps(asdict(note)), mode=0o600)

    def read(self, dashboard_url: str) -> DeployedFile | None:
        """The note of a cluster; None when there is none, or none that can be read."""
        try:
            values = json.loads(self._place(dashboard_url).read_bytes())
            return DeployedFile(**{**values, "assignments": tuple(values["assignments"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _place(self, dashboard_url: str) -> Path:
        name = hashlib.sha256(dashboard_url.encode()).hexdigest()[:16]
        return self._folder / f"deployed-{name}.json"
