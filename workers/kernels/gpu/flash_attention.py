"""Attention of prompts by FlashInfer, for a group that asks for it.

FlashInfer reads the pool as it lies: pages (KV heads, page size, d) with strides, its layout HND. Its `plan`
says on the host which tiles each program computes. A step is planned once for each kind of layer, by the
first layer of that kind; the others run that plan.

Slices of one row stay with our own kernels, whatever is beside them: a decode row has the bits that it has in
a CUDA graph. Contexts are never split. On Hopper the tiles are set by the head size alone; elsewhere by the
mean length of the slices (`docs/gpu.md` has what FlashInfer's sources say).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from workers.kernels.batch import StepBatch
from workers.kernels.paged_cache import LayerCache

_HEAD_DIMS: Final = (64, 128, 256)
_WORKSPACE_BYTES: Final = 1 << 20  # for the parts of split contexts, of which there are none
_PARAMETERS: Final = {  # that we name
    "__init__": "float_workspace_buffer kv_layout backend",
    "plan": "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads "
    "head_dim_qk page_size causal sm_scale window_left logits_soft_cap q_data_type kv_data_type "
    "disable_split_kv",
    "run": "q paged_kv_cache out",
}
_log = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, StepBatch], torch.Tensor]  # of our own kernels


class Kind(NamedTuple):
    """What the layers that share a plan have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int | None
    soft_cap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step, cut into its chunks (slices of several rows) and the rest."""

    batch: StepBatch
    chunks: npt.NDArray[np.int64]  # slices
    rows: torch.Tensor  # of the chunks, (rows,) int64
    other_rows: torch.Tensor
    others: StepBatch | None  # None: all rows are in chunks


def load_flash_attention(device: torch.device) -> FlashAttention | None:
    """None where FlashInfer is not installed or not as we know it; the log says so."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Wrapper
    except (ImportError, OSError, RuntimeError) as error:
        _log.warning("FlashInfer cannot be imported, Triton computes prompts: %s", error)
        return None
    for method, needed in _PARAMETERS.items():
        missing = set(needed.split()) - set(inspect.signature(getattr(Wrapper, method)).parameters)
        if missing:
            names = ", ".join(sorted(missing))
            _log.warning("this FlashInfer's %s has no %s, Triton computes prompts", method, names)
            return None
    # Not auto, which also goes by the lengths in a step.
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return FlashAttention(Wrapper, "fa3" if is_hopper else "fa2", device)


class FlashAttention:
    """Over one wrapper of FlashInfer for each kind of layer. These and their workspaces are made by the first
    prompts, which are computed at load, before the pool is measured."""

    def __init__(self, wrapper: type[Any], backend: str, device: torch.device) -> None:
        """wrapper: FlashInfer's of prompts over pages; backend: of its kernels."""
        self._wrapper, self._backend, self._device = wrapper, backend, device
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: dict[Kind, _Plan] = {}
        self._step: _Step | None = None  # the last one
        self.is_broken = False  # it has failed at a first plan: nothing goes to it any more

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        own: Attend,
    ) -> torch.Tensor:
        """As `Kernels.paged_attention`; own: for what is not for FlashInfer."""
        (heads, dim), (kv_heads, size) = q.shape[1:], cache.keys.shape[1:3]
        kind = Kind(heads, kv_heads, dim, size, scale, sliding_window, soft_cap)
        if self.is_broken or not _can_take(q, cache, batch, kind):
            return own(q, batch)
        if self._step is None or self._step.batch is not batch:
            self._step = _cut(batch, self._device)
        step = self._step
        chunks = q if step.others is None else q[step.rows]
        found = torch.empty(chunks.shape, dtype=q.dtype, device=q.device)
        try:
            plan = self._plans.get(kind) or _Plan(
                self._wrapper(self._workspace, kv_layout="HND", backend=self._backend), self._device
            )
            plan.run(step, kind, chunks, cache, found)
        except torch.AcceleratorError:  # of which each later kernel would fail too
            raise
        except Exception as error:  # kernels are compiled at the first plan, which may fail in any way
            if kind in self._plans:
                raise
            self.is_broken = True
            _log.warning("FlashInfer fails, Triton computes prompts: %s: %s", type(error).__name__, error)
            return own(q, batch)
        self._plans[kind] = plan
        if step.others is None:
            return found
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[step.rows] = found
        out[step.other_rows] = own(q[step.other_rows], step.others)
        return out


class _Plan:
    """One wrapper, and the step that it is planned for."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper, self._device = wrapper, device
        self._step: _Step | None = None
        # A plan goes to the device from one piece of pinned memory, which the next one is written over.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def run(self, step: _Step, kind: Kind, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        if self._step is not step:
            if self._copied is not None:
                self._copied.synchronize()
            self._wrapper.plan(
                *(_on_host(each, self._device) for each in _places(step, kind)),
                num_qo_heads=kind.heads,
                num_kv_heads=kind.kv_heads,
                head_dim_qk=kind.head_dim,
                page_size=kind.block_size,
                causal=True,
                sm_scale=kind.scale,
                window_left=-1 if kind.window is None else kind.window - 1,  # beside the row itself
                logits_soft_cap=kind.soft_cap,
                q_data_type=q.dtype,
                kv_data_type=cache.keys.dtype,
                disable_split_kv=True,
            )
            if self._copied is not None:
                self._copied.record()
            self._step = step
        self._wrapper.run(q, (cache.keys, cache.values), out=out)


def _can_take(q: torch.Tensor, cache: LayerCache, batch: StepBatch, kind: Kind) -> bool:
    """Looks at shapes alone. A step of slices of one row, as graphs have it, is none for FlashInfer."""
    return (
        batch.host is not None
        and batch.parents is None
        and q.shape[0] > batch.context_lens.shape[0]
        and q.dtype == cache.keys.dtype == torch.bfloat16
        and q.stride(2) == 1
        and kind.head_dim in _HEAD_DIMS
        and (kind.window is None or kind.window >= kind.block_size)  # see _places
    )


def _cut(batch: StepBatch, device: torch.device) -> _Step:
    assert batch.host is not None, "_can_take() looked"
    lens, starts = batch.host.lens, batch.host.starts
    is_in_chunk = np.repeat(lens > 1, lens)
    rows, other_rows, sequences = (
        _on_host(np.flatnonzero(each), device).to(device, non_blocking=True)
        for each in (is_in_chunk, ~is_in_chunk, lens == 1)
    )
    others = None
    if len(other_rows):
        others = replace(
            batch,
            token_ids=batch.token_ids[other_rows],
            positions=batch.positions[other_rows],
            slots=batch.slots[other_rows],
            query_starts=torch.arange(len(other_rows) + 1, dtype=torch.int32, device=device),
            context_lens=batch.context_lens[sequences],
            block_tables=batch.block_tables[sequences],
            logit_rows=other_rows[:0],
            max_context_len=int(starts[lens == 1].max()) + 1,
            lengths=None,
            max_length=0,
            host=None,
        )
    return _Step(
        batch=batch, chunks=np.flatnonzero(lens > 1), rows=rows, other_rows=other_rows, others=others
    )


def _places(step: _Step, kind: Kind) -> tuple[npt.NDArray[np.int32], ...]:
    """The first four arguments of `plan`: starts of the chunks' rows and pages, the pages, and rows of each
    last page.

    FlashInfer's tiles may begin before the window, where blocks may be anybody's: in their place it reads the
    first block that a row sees, which is the sequence's own, and full.
    """
    arrays, size = step.batch.host, kind.block_size
    assert arrays is not None, "_can_take() looked"
    lens, starts = arrays.lens[step.chunks], arrays.starts[step.chunks]
    contexts, firsts = starts + lens, (np.cumsum(arrays.block_counts) - arrays.block_counts)[step.chunks]
    pages = []
    for start, context, first in zip(starts.tolist(), contexts.tolist(), firsts.tolist(), strict=True):
        own = arrays.blocks[first : first - (-context // size)].copy()
        if kind.window is not None:
            seen = max(0, start - kind.window + 1) // size
            own[:seen] = own[seen]
        pages.append(own)
    sums = [np.cumsum([0, *each]) for each in (lens, map(len, pages))]
    last = (contexts - 1) % size + 1
    return tuple(each.astype(np.int32) for each in (*sums, np.concatenate(pages), last))


def _on_host(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """From pinned memory a copy to the device need not be waited for."""
    found = torch.from_numpy(values)
    return found.pin_memory() if device.type == "cuda" else found
