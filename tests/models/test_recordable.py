"""What a CUDA graph can hold: a step that neither waits for the device nor brings anything from the host.

Not seen on the CPU: `tolist`, which reads memory there without an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import checkpoints
from tests.models.emulated_device import EmulatedDevice
from tests.models.test_graphs import BLOCK_SIZE, decode_step, pool_of
from workers.kernels import LayerCache, StepBatch, TorchKernels, build_batch, unpack
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import load_decoder
from workers.model.parallel import TensorParallel
from workers.runtime.graphs.buckets import GraphKey
from workers.runtime.graphs.static_batch import StaticBatch

# Reads a number on the host; has a shape that depends on numbers; makes a tensor of numbers of the host.
FORBIDDEN = {
    "aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero",
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::lift_fresh", "aten::lift_fresh_copy",
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Refuses operators that a recorded step must not have."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        assert name not in FORBIDDEN, f"{name} inside a step"
        if name == "aten::index":
            assert not any(at is not None and at.dtype == torch.bool for at in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


class Recordable(TorchKernels):
    """Those of torch, but for the two that look at what the batch says."""

    def rotary_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        batch: StepBatch,
        cache: LayerCache,
    ) -> torch.Tensor:
        return q

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        return torch.zeros_like(q)


@pytest.mark.parametrize("name", [family.name for family in checkpoints.FAMILIES])
@pytest.mark.parametrize("context", [40, 240])
def test_a_decode_step(name: str, context: int, family_folder: Callable[[str], Path]) -> None:
    """Of every family, below and beyond the length that a stretched rotary embedding was trained for."""
    cpu = torch.device("cpu")
    decoder = load_decoder(
        Checkpoint(family_folder(name)), torch.float32, cpu, TensorParallel(), Recordable()
    )
    context = min(context, decoder.spec.max_model_len)
    static = StaticBatch(EmulatedDevice(), cpu, max_rows=4, max_context=context, block_size=BLOCK_SIZE)
    key, pool = GraphKey(4, context), pool_of(decoder)
    step = unpack(decode_step((3, 9)))
    static.fill(key, build_batch(step, block_size=BLOCK_SIZE, num_blocks=40, vocab_size=128, device=cpu))
    batch = static.batch(key)
    if not decoder.is_recordable:
        with pytest.raises(AssertionError, match="aten::bincount inside a step"), Watch():
            decoder.run_batch(batch, pool)
        return
    with Watch():
        logits, hidden = decoder.run_batch(batch, pool)
    assert logits is not None and hidden is not None and logits.shape == (4, decoder.spec.vocab_size)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0]),
        lambda x: x + x.new_tensor(2.0),
        lambda x: bool(x.any()),
    ],
)
def test_the_watch_sees(work: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError), Watch():
        work(torch.ones(3))
