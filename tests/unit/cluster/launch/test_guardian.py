"""A starter that is killed leaves nothing; one that stops in order is not interfered with."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.launch.guardian import Guardian
from cluster.launch.marked import MARK, end_marked, marked_processes

SLEEP = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEP}"
# PR_SET_NAME, with bytes that are no UTF-8.
NAMED = f"import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0); print(flush=True); {SLEEP}"
STARTER = """\
import subprocess, sys, time
from pathlib import Path
from cluster.launch.guardian import Guardian
mark, folder, code = sys.argv[1:]
guardian = Guardian.start(mark, Path(folder))
subprocess.Popen([sys.executable, "-c", code], env={"TANDEM_CLUSTER_MARK": mark}, start_new_session=True)
print(guardian._process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    mark = secrets.token_hex(8)
    yield mark
    end_marked(mark, term_s=0.0, kill_s=5.0)


def start(mark: str, code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, MARK: mark}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_killed_starter_leaves_no_marked_process_and_no_folder(mark: str, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    bystander = start("another", SLEEP)
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, mark, str(folder), SLEEP], stdout=subprocess.PIPE, text=True
    )
    try:
        assert starter.stdout is not None
        guardian = int(starter.stdout.readline())
        assert within(5.0, lambda: len(list(marked_processes(mark))) == 1)
        starter.send_signal(signal.SIGKILL)
        starter.communicate(timeout=10)
        assert within(10.0, lambda: not list(marked_processes(mark)))
        assert within(5.0, lambda: not folder.exists())
        assert within(5.0, lambda: not Path(f"/proc/{guardian}").exists() or _is_zombie(guardian))
        assert bystander.poll() is None
    finally:
        starter.kill()
        bystander.kill()
        bystander.communicate(timeout=10)


def test_a_dismissed_guardian_ends_and_does_nothing(mark: str, tmp_path: Path) -> None:
    living = start(mark, SLEEP)
    try:
        Guardian.start(mark, tmp_path).dismiss()
        assert living.poll() is None
        assert tmp_path.exists()
    finally:
        living.kill()
        living.communicate(timeout=10)


def test_a_starter_that_stands_in_a_folder_named_like_this_package_is_guarded(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "cluster").mkdir(parents=True)
    (tmp_path / "here" / "cluster" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path / "here")
    guardian = Guardian.start(mark, tmp_path / "none")
    living = start(mark, SLEEP)
    assert guardian._process.stdin is not None
    guardian._process.stdin.close()  # as when the starter is gone
    assert guardian._process.wait(timeout=20) == 0
    assert living.wait(timeout=10) == -signal.SIGTERM
    living.communicate(timeout=10)


def test_processes_are_found_beside_one_whose_name_is_no_text(mark: str) -> None:
    named = start(mark, NAMED)
    try:
        assert named.stdout is not None
        named.stdout.readline()
        assert list(marked_processes(mark)) == [named.pid]
    finally:
        named.kill()
        named.communicate(timeout=10)


def test_what_does_not_end_when_asked_is_killed_and_named(mark: str) -> None:
    polite, stubborn = start(mark, SLEEP), start(mark, STUBBORN)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    (killed,) = end_marked(mark, term_s=0.3, kill_s=5.0)
    assert killed.startswith(f"{stubborn.pid} {sys.executable} -c import signal")
    assert (polite.wait(timeout=10), stubborn.wait(timeout=10)) == (-signal.SIGTERM, -signal.SIGKILL)
    stubborn.stdout.close()
    assert polite.stdout is not None
    polite.stdout.close()
    assert end_marked(mark, term_s=1.0, kill_s=1.0) == []


def _is_zombie(pid: int) -> bool:
    """Ended, but not yet collected by the parent that it was left to."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
