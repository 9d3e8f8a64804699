"""The kernels are imported here first: see `interpreter`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.unit.kernels.gpu.interpreter import interpreting

with interpreting():
    import workers.kernels.gpu.blocks
    import workers.kernels.gpu.kernels
    import workers.kernels.gpu.philox  # noqa: F401


@pytest.fixture(autouse=True)
def numbers_of_the_hardware() -> Iterator[None]:
    """Overflow to an infinity and NaN are results there, not warnings."""
    with np.errstate(all="ignore"):
        yield
