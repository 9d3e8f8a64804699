"""Sets up the peers, each in a virtual environment of its own, from PyPI with pinned versions.

    python -m benchmarks.peers.install [NAME ...]

A peer that cannot be installed is reported with the reason and left out; the others go on. Exit code 1 when
none is there at the end. Environments lie in ~/.cache/tandem/peers/NAME, beside NAME.log; delete to undo.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from pathlib import Path

from benchmarks.peers.catalogue import CATALOGUE, PeerKind, default_root

_TIMEOUT_S = 1800  # of one peer; llama.cpp is compiled


class InstallFailed(Exception):
    """A peer is not there. The text says why."""


def install(kind: PeerKind, root: Path) -> None:
    """Makes or completes the environment of a peer. Raises InstallFailed."""
    folder, log = root / kind.name, root / f"{kind.name}.log"
    root.mkdir(parents=True, exist_ok=True)
    if not kind.python(root).exists():
        venv.create(folder, with_pip=True)
    pip = [str(kind.python(root)), "-m", "pip"]
    with log.open("w") as output:
        try:
            for command in (
                [*pip, "install", "--disable-pip-version-check", "-r", str(kind.requirements)],
                *([*pip, "uninstall", "-y", package] for package in kind.unwanted),
                [str(kind.python(root)), "-c", f"import {kind.module}"],
            ):
                subprocess.run(
                    command,
                    stdout=output,
                    stderr=output,
                    check=True,
                    timeout=_TIMEOUT_S,
                    env=kind.environment(),
                )
        except subprocess.CalledProcessError as error:
            raise InstallFailed(f"{' '.join(error.cmd)} failed:\n{_last_lines(log)}") from error
        except subprocess.TimeoutExpired as error:
            raise InstallFailed(f"not ready after {_TIMEOUT_S} s; see {log}") from error
    kind.stamp(root).write_text(kind.requirements.read_text())


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-5:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.install")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CATALOGUE)}; default: all")
    names = parser.parse_args().names or list(CATALOGUE)
    if unknown := set(names) - set(CATALOGUE):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(CATALOGUE)}")
    root = default_root()
    for name in names:
        kind = CATALOGUE[name]
        if kind.is_installed(root):
            print(f"{name}: there already", flush=True)
            continue
        print(f"{name}: installing into {root / name} (minutes; output in {root / name}.log)", flush=True)
        started = time.monotonic()
        try:
            install(kind, root)
        except InstallFailed as error:
            print(f"{name}: LEFT OUT: {error}", flush=True)
        else:
            print(f"{name}: ready after {time.monotonic() - started:.0f} s", flush=True)
    if not any(CATALOGUE[name].is_installed(root) for name in names):
        sys.exit(1)


if __name__ == "__main__":
    main()
