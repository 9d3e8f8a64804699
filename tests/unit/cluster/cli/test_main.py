"""The entry point: early interrupts and outputs that take nothing end with a line."""

from __future__ import annotations

import subprocess
import sys

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
