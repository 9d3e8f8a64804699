"""Running a measuring program as a child process; see `cluster.bench.orders` for what is said to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from cluster.bench.orders import Order
from cluster.child import module_command, module_path

_MODULE = "cluster.bench.program"
# As rank processes have it: by default libgomp's threads spin for milliseconds at every barrier, which beside
# other busy programs makes a step many times slower.
_SPIN_COUNT = {"GOMP_SPINCOUNT": "5000"}
_STOP_TIMEOUT_S = 10.0


class MeasuringFailed(RuntimeError):
    """The program ended without a result. The text is its own last word."""


def child_environment() -> dict[str, str]:
    """Of a program that must find this package also when it is not installed."""
    return {**_SPIN_COUNT, **os.environ, "PYTHONPATH": module_path()}


def measure(order: Order, report: Callable[[str], None], *, timeout_s: float) -> Mapping[str, Any]:
    """The result. `report` hears each line of progress. Raises MeasuringFailed, also after `timeout_s`.

    The child is ended whatever happens here.
    """
    with subprocess.Popen(
        module_command(_MODULE),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    ) as process:
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            _end(process)

        watch = threading.Timer(timeout_s, give_up)
        watch.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError), process.stdin as pipe:  # of one that has ended already
                pipe.write(msgspec.json.encode(order))
            for line in process.stdout:
                said: Any = _parsed(line)
                if "progress" in said:
                    report(str(said["progress"]))
                elif "error" in said:
                    raise MeasuringFailed(str(said["error"]))
                elif "result" in said:
                    result: Mapping[str, Any] = said["result"]
                    return result
            with suppress(subprocess.TimeoutExpired):  # it has closed its output, so it is ending
                process.wait(_STOP_TIMEOUT_S)
        finally:
            watch.cancel()
            _end(process)
    if is_late.is_set():
        raise MeasuringFailed(f"not done within {timeout_s:g} s: measure less, or on a quieter machine")
    if process.returncode < 0:
        number = signal.Signals(-process.returncode)
        why = ", as for want of memory" if number == signal.SIGKILL else ""
        raise MeasuringFailed(f"the measuring program was ended by {number.name}{why}")
    raise MeasuringFailed(f"the measuring program ended with code {process.returncode}; it said why above")


def _parsed(line: bytes) -> dict[str, Any]:
    """A line of the protocol; anything else on its standard output is passed over."""
    try:
        said: Any = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks first: what is half made is removed on the way out."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
