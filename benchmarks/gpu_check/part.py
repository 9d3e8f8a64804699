"""One part of the check, in this process: `python -m benchmarks.gpu_check.part NAME`, settings on stdin."""

from __future__ import annotations

import sys

from benchmarks.gpu_check.findings import end
from benchmarks.gpu_check.settings import Settings


def main(name: str, settings: Settings) -> None:
    """Imports what the part needs: Triton must not be there before its interpreter is chosen, nor a whole
    model's libraries for what runs without."""
    if name == "kernels":
        from benchmarks.gpu_check.kernels import check_kernels

        check_kernels(settings)
    elif name == "flashinfer":
        from benchmarks.gpu_check.flash import check_flash

        check_flash(settings)
    elif name == "repeat":
        from benchmarks.gpu_check.repeat import check_repeats

        check_repeats(settings)
    elif name == "ranks":
        from benchmarks.gpu_check.ranks import check_ranks

        check_ranks(settings)
    else:
        from benchmarks.gpu_check.model import check_model

        check_model(name, settings)
    end()


if __name__ == "__main__":
    main(sys.argv[1], Settings.from_json(sys.stdin.read()))
