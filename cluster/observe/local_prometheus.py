"""Debian's Prometheus on this machine, for looking at a cluster without any other setup.

It listens on the loopback address, keeps its data in a folder of its own that goes when it ends, and runs as
long as the command that started it: when that is killed, a guardian ends it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from cluster.launch.guardian import Guardian
from cluster.launch.marked import MARK
from cluster.launch.ports import reserved_port
from cluster.observe.prometheus_api import ObserveError
from dashboards import alerts

_START_S: Final = 30.0
_STOP_S: Final = 10.0
_RULES: Final = "alerts.yml"


def find_program(name: str, *, unpacked: Path | None = None) -> Path | None:
    """`prometheus` or `promtool`: installed, or unpacked into ~/.cache/tandem/prometheus."""
    installed = shutil.which(name)
    if installed is not None:
        return Path(installed)
    folder = unpacked or Path.home() / ".cache" / "tandem" / "prometheus" / "usr" / "bin"
    program = folder / name
    return program if os.access(program, os.X_OK) else None


def need_prometheus(*, unpacked: Path | None = None) -> Path:
    """Raises ObserveError where there is none."""
    program = find_program("prometheus", unpacked=unpacked)
    if program is None:
        raise ObserveError("Prometheus is not installed: apt install prometheus")
    return program


@dataclass(frozen=True, slots=True)
class LocalPrometheus:
    """One that runs."""

    url: str
    process: subprocess.Popen[bytes]

    def wait(self) -> int:
        """Until it ends by itself; its exit status. Ctrl-C interrupts."""
        return self.process.wait()


@contextmanager
def running(
    program: Path,
    config: Callable[[Path], Mapping[str, Any]],
    *,
    port: int,
    data: Path | None = None,
) -> Iterator[LocalPrometheus]:
    """A Prometheus that answers, until the block ends. `config`: the scrape config, given the folder in
    which it may put files. `data`: blocks to look at instead of an empty store. Raises ObserveError, and
    LaunchError for a port that is taken."""
    with ExitStack() as undo:
        undo.enter_context(reserved_port("127.0.0.1", port))  # or another Prometheus would be taken for ours
        folder = Path(tempfile.mkdtemp(prefix="tandem-prometheus-"))  # only its owner may look into it
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        mark = secrets.token_hex(8)
        undo.callback(Guardian.start(mark, folder).end_all)  # of one that Ctrl-C came to while it started
        (folder / _RULES).write_text(yaml.safe_dump(alerts.rules(), sort_keys=False), encoding="utf-8")
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(dict(config(folder)), sort_keys=False), encoding="utf-8")
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    str(program),
                    f"--config.file={file}",
                    f"--storage.tsdb.path={data or folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, MARK: mark},
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        undo.callback(_stop, process)
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, log)
        yield LocalPrometheus(url, process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    with httpx.Client(timeout=1.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                last = log.read_text(errors="replace").strip()[-1000:]
                raise ObserveError(f"Prometheus did not start (exit {process.returncode}): {last}")
            try:
                if client.get(f"{url}/-/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not yet
            time.sleep(0.1)
    raise ObserveError(f"Prometheus did not answer at {url} within {_START_S:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_STOP_S)
