"""A small process that ends a local cluster when whoever started it is gone.

    python -m cluster.launch.guardian MARK FOLDER

Life cycle: `Guardian.start`, before anything of the cluster exists, starts it with a pipe of which only the
starter holds the other end. After an orderly stop the starter says so through the pipe. When the pipe closes
without that word, the starter was killed: then the guardian ends every process with the mark and removes the
folder. It carries no mark itself, and a session of its own, so neither Ctrl-C nor a stop reaches it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from cluster.child import module_command, module_path
from cluster.launch.marked import MARK, end_marked

_STOPPED = b"stopped"
_TERM_S, _KILL_S = 5.0, 5.0


class Guardian:
    """The starter's side."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, mark: str, folder: Path) -> Guardian:
        """Watch over the processes with a mark, and a folder that goes with them."""
        return cls(
            subprocess.Popen(
                module_command("cluster.launch.guardian", mark, str(folder)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **{name: value for name, value in os.environ.items() if name != MARK},
                    "PYTHONPATH": module_path(),
                },
                start_new_session=True,
            )
        )

    def dismiss(self) -> None:
        """All is stopped: nothing more to watch over."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(_STOPPED, timeout=5.0)

    def end_all(self) -> None:
        """What runs is not known: the guardian ends it, as when the starter is gone."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=2 * (_TERM_S + _KILL_S))


def main() -> None:
    """The guardian's side: wait for the word, or for the end of the pipe."""
    mark, folder = sys.argv[1:]
    if sys.stdin.buffer.read() != _STOPPED:
        end_marked(mark, term_s=_TERM_S, kill_s=_KILL_S)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
