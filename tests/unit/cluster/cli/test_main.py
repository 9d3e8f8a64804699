"""The entry point: early interrupts and outputs that take nothing end with a line."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "from cluster.cli import main; main()"
TIMEOUT_S = 60.0


def test_an_interrupt_while_modules_load_is_a_line() -> None:
    program = f"""
import builtins, os, signal
real = builtins.__import__
def slow(name, *rest):
    if name == "cluster.cli.commands":
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = slow
{PROGRAM}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"error: interrupted\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    program = f"import sys, signal, os; signal.signal(signal.SIGINT, signal.SIG_IGN); {PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_under_standard_output_is_a_line() -> None:
    command = [sys.executable, "-c", PROGRAM, "plan", "llama-2-7b", "--device", "h100", "--json"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr == b"error: standard output: No space left on device\n"


def test_the_entry_point_loads_little_before_it_listens() -> None:
    program = "import sys, cluster.cli; print([name for name in ('typer', 'rich') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], timeout=TIMEOUT_S) == b"[]\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_change_no_exit_code(tmp_path: Path, closed: str) -> None:
    program = shlex.join([sys.executable, "-c", PROGRAM])
    for arguments, code in (("plan llama-2-7b --device h100", 0), ("validate none.yaml --json", 2)):
        command = f"exec {program} {arguments} {closed}"
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, timeout=TIMEOUT_S)
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done.stderr


def test_children_have_the_standard_streams_that_were_closed() -> None:
    child = "import sys; sys.stderr.write(f'{sys.stdin is None} {sys.stdout is None}')"
    program = (
        "from cluster.cli import _open_missing_streams as o; import subprocess as s, sys; o(); "
        f'sys.exit(s.call([sys.executable, "-c", {child!r}]))'
    )
    command = f"exec {shlex.join([sys.executable, '-c', program])} <&- >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, b"False False")


def test_a_question_that_nobody_can_answer_is_said_so() -> None:
    """Standard input may be closed."""
    program = "from cluster.cli import _open_missing_streams as o; import sys; o(); print(sys.stdin.isatty())"
    command = f"exec {shlex.join([sys.executable, '-c', program])} <&-"
    assert subprocess.check_output(["sh", "-c", command], timeout=TIMEOUT_S) == b"False\n"
