"""The Triton kernels without a GPU: in Triton's interpreter, mended where numpy is not the hardware.

The interpreter runs a kernel operation by operation in numpy. It is chosen by an environment variable that is
read when a function of Triton is defined, so for a process that has it from the start:
`tests.unit.kernels.test_gpu` starts one, and so does the dry run of `benchmarks.gpu_check`. Any other process
does not collect the tests of the kernels. By hand: TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/gpu

numpy has no bfloat16: the interpreter keeps its bits in uint16, cuts them off instead of rounding, makes them
of integers as if they were uint16, and multiplies them as integers in `dot`. Those operations are replaced by
what the hardware does:

- conversions round to nearest, halves to even;
- a product of tiles goes on in steps of 16 elements, as that of matrix units: a step adds up in float64 and
  is rounded to float32 once, then added to the sum before it. So it does not depend on the shape of the tiles
  either, where BLAS would.

And a number of a kernel, to the interpreter an array of one, no longer is an index for numpy 2.4.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_STEP = 16


def can_run() -> bool:
    """Whether this process runs kernels."""
    return DEVICE.type == "cuda" or is_interpreter()


def is_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def mend() -> None:
    """Replaces what numpy cannot do; once, before the first kernel runs."""
    plain_cast, plain_patch = InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor

    def wide(handle: TensorHandle):  # -> array
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
        a, b, found = wide(left).astype(np.float64), wide(right).astype(np.float64), total.data
        for at in range(0, a.shape[-1], _STEP):
            step = np.matmul(a[..., at : at + _STEP], b[..., at : at + _STEP, :])
            found = found + step.astype(total.data.dtype)
        return TensorHandle(found, total.dtype.scalar)

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    InterpreterBuilder.cast_impl = cast
    for name in ("si_to_fp", "ui_to_fp", "fp_ext", "fp_trunc", "fp_to_fp"):
        setattr(InterpreterBuilder, f"create_{name}", cast)
    InterpreterBuilder.create_dot = dot
