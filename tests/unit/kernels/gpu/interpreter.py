"""Loads the Triton kernels: for the CUDA device where there is one, else in Triton's interpreter.

The interpreter runs a kernel operation by operation in numpy. It is chosen by an environment variable that is
read when a kernel is defined, so the variable is set here while the kernels are imported, and not longer.

numpy has no bfloat16: the interpreter keeps its bits in uint16, cuts them off instead of rounding, makes them
of integers as if they were uint16, and multiplies them as integers in `dot`. Those operations are replaced by
what the hardware does:

- conversions round to nearest, halves to even;
- a product of tiles adds up in float64 and is rounded to float32 once, then added to the sum before it. So it
  does not depend on the shape of the tiles either, as on the hardware, where BLAS would.

And a number of a kernel, to the interpreter an array of one, no longer is an index for numpy 2.4.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_VARIABLE = "TRITON_INTERPRET"


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels that are defined inside run in the interpreter, where there is no CUDA device."""
    if DEVICE.type == "cuda":
        yield
        return
    assert "triton" not in sys.modules, (
        "Triton was imported before these tests: its own functions are compiled"
    )
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
        _mend()
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def _mend() -> None:
    import triton.experimental.gluon  # noqa: F401 - the first launch imports it, and it reads the variable
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_cast, plain_patch = InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor

    def wide(handle: TensorHandle) -> np.ndarray:
        """As numbers that numpy can compute with."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def cast(self: InterpreterBuilder, handle: TensorHandle, to: tl.dtype, *_: object) -> TensorHandle:
        if to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(wide(handle).astype(np.float32))).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if handle.dtype.scalar == tl.bfloat16:
            return plain_cast(self, TensorHandle(wide(handle), tl.float32), to)
        return plain_cast(self, handle, to)

    def dot(
        self: InterpreterBuilder,
        left: TensorHandle,
        right: TensorHandle,
        total: TensorHandle,
        precision: object,
        imprecise: object,
    ) -> TensorHandle:
        product = np.matmul(wide(left).astype(np.float64), wide(right).astype(np.float64))
        return TensorHandle(product.astype(total.data.dtype) + total.data, total.dtype.scalar)

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    InterpreterBuilder.cast_impl = cast
    for name in ("si_to_fp", "ui_to_fp", "fp_ext", "fp_trunc", "fp_to_fp"):
        setattr(InterpreterBuilder, f"create_{name}", cast)
    InterpreterBuilder.create_dot = dot
