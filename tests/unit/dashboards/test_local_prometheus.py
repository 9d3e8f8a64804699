"""A Prometheus on this machine that is a few lines of Python: whose port it is, and when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.launch.errors import LaunchError
from cluster.launch.marked import MARK, end_marked, marked_processes
from cluster.launch.ports import free_port
from cluster.observe.local_prometheus import running

PROGRAM = f"""#!{sys.executable}
import http.server, os, sys
from pathlib import Path
port = int(sys.argv[3].rpartition(":")[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
Path(__file__).with_name("pid").write_text(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
STARTER = """
import sys, time
from pathlib import Path
from cluster.observe.local_prometheus import running
with running(Path(sys.argv[1]), lambda folder: {}, port=int(sys.argv[2])):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "prometheus"
    file.write_text(PROGRAM)
    file.chmod(0o700)
    return file


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_another_prometheus_on_the_port_is_not_taken_for_ours(program: Path) -> None:
    port = free_port()
    with running(program, lambda folder: {}, port=port) as first:
        pid = program.with_name("pid").read_text()
        assert first.url == f"http://127.0.0.1:{port}"
        with (
            pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 cannot be used"),
            running(program, lambda folder: {}, port=port),
        ):
            raise AssertionError("it is taken for ours")
        assert program.with_name("pid").read_text() == pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_is_killed_leaves_neither_it_nor_its_folder(program: Path, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(program), str(free_port())],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"ready\n"
    pid = int(program.with_name("pid").read_text())
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    starter.send_signal(signal.SIGKILL)
    starter.communicate(timeout=10)
    assert within(10.0, lambda: not Path(f"/proc/{pid}/exe").exists())
    assert within(10.0, lambda: not list((tmp_path / "temporary").iterdir()))


def test_an_interrupt_while_it_is_started_leaves_neither_it_nor_its_folder(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[str] = []

    class Interrupted(subprocess.Popen[bytes]):
        """The process runs, and Ctrl-C comes before it can be known to whoever starts it."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if mark := options["env"].get(MARK):
                marks.append(mark)
                raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), running(program, lambda folder: {}, port=free_port()):
            raise AssertionError("it was not interrupted")
        (mark,) = marks
        assert list(marked_processes(mark)) == []
        assert list((tmp_path / "temporary").iterdir()) == []
    finally:
        for mark in marks:
            end_marked(mark, term_s=0.0, kill_s=5.0)
