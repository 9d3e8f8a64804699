"""How long the threads of libgomp spin at barriers, for all subjects of a benchmark alike.

As rank processes have it. By default other busy programs make a subject that waits there many times slower;
alone it changes nothing.
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "GOMP_SPINCOUNT"


def spin_briefly() -> None:
    """Starts this program anew with a small count, unless one is set: it is read when torch loads."""
    if SPIN_COUNT not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, SPIN_COUNT: "5000"})
