"""Compiles the CPU kernels ahead of the first use: `python -m workers.kernels.build`."""

from __future__ import annotations

import time

from workers.kernels.compiler import KernelsUnavailable, default_cache, library


def main() -> None:
    """Builds, with one line of progress. Where that is impossible it says why: the engine runs without."""
    print("compiling CPU kernels ...", end=" ", flush=True)
    started = time.monotonic()
    try:
        path = library(default_cache())
    except KernelsUnavailable as error:
        print(f"not available, torch operators will be used instead, several times slower: {error}")
    else:
        print(f"ready in {time.monotonic() - started:.1f} s: {path}")


if __name__ == "__main__":
    main()
