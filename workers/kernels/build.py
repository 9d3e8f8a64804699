"""Compiles the CPU kernels ahead of the first use: `python -m workers.kernels.build`."""

from __future__ import annotations

import sys
import time

from workers.kernels.compiler import KernelsUnavailable, default_cache, library


def main() -> int:
    """Builds, with one line of progress."""
    print("compiling CPU kernels ...", end=" ", flush=True)
    started = time.monotonic()
    try:
        path = library(default_cache())
    except KernelsUnavailable as error:
        print(f"not available, torch operators will be used instead: {error}")
        return 1
    print(f"ready in {time.monotonic() - started:.1f} s: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
