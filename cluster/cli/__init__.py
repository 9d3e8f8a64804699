"""The `tandem` command: `main` starts it, `cluster.cli.commands` has the commands."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130
_FAILED = 1


def main() -> None:
    """Entry point of the installed command. However early it is interrupted, and wherever its output goes, it
    ends with a line and not with a traceback."""
    _open_missing_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else ignored, as of a job in the background
        signal.signal(signal.SIGINT, _leave)
    # Here and not above: these imports take seconds on a busy machine, and Ctrl-C may come in them.
    from cluster.cli.commands import app
    from cluster.cli.services import Services

    signal.signal(signal.SIGINT, before)
    try:
        try:
            app(obj=Services())
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _leave(signal.SIGINT, None)
    except OSError as error:  # commands name every file but this one
        _give_up_output()
        print(f"error: standard output: {error.strerror or error}", file=sys.stderr)
        sys.exit(_FAILED)


def _open_missing_streams() -> None:
    """Standard streams that were closed by whoever started this process: nothing is read, and what is written
    goes nowhere. A file that is opened later must not get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)  # else it would be missing again in the children
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends a process that has started nothing yet."""
    os.write(2, b"error: interrupted\n")
    os._exit(_INTERRUPTED)


def _give_up_output() -> None:
    """What is still buffered goes nowhere, or the interpreter would fail on it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
