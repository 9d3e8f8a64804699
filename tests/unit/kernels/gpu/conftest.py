"""Which process runs the tests of this folder, and in which state: see `interpreter`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from workers.kernels.gpu.interpreter import can_run, is_interpreter, mend

collect_ignore_glob = [] if can_run() else ["test_*.py"]
if is_interpreter():
    mend()


@pytest.fixture(autouse=True)
def numbers_of_the_hardware() -> Iterator[None]:
    """Overflow to an infinity and NaN are results there, not warnings."""
    with np.errstate(all="ignore"):
        yield
