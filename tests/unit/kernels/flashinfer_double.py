"""A double of FlashInfer's wrapper of prompts over pages: refuses what the real one (0.7.4) refuses or would
read wrongly, and computes with torch.

What is masked gets the weight 0, and is read all the same: a NaN there comes out, as it would of a product of
tiles. It reads from the beginning of the window's group of 128 positions on, and the first group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

_GROUP = 128


@dataclass(slots=True)
class Calls:
    """What the wrappers were asked."""

    made: list[str] = field(default_factory=list)  # backends
    plans: list[dict[str, Any]] = field(default_factory=list)
    num_runs: int = 0
    fault: Exception | None = None  # that plans raise


def wrapper_of(calls: Calls) -> type[Any]:
    """The class, whose objects write down what they are asked."""

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(
            self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto"
        ) -> None:
            assert float_workspace_buffer.data_ptr() % 16 == 0
            assert kv_layout == "HND" and backend in ("fa2", "fa3"), (kv_layout, backend)
            calls.made.append(backend)
            self._plan: dict[str, Any] | None = None

        def plan(
            self,
            qo_indptr: torch.Tensor,
            paged_kv_indptr: torch.Tensor,
            paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            head_dim_vo: int | None = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            sm_scale: float | None = None,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            q_data_type: str | torch.dtype = "float16",
            kv_data_type: str | torch.dtype | None = None,
            non_blocking: bool = True,
            fixed_split_size: int | None = None,
            disable_split_kv: bool = False,
        ) -> None:
            if calls.fault is not None:
                raise calls.fault
            arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            for each in arrays:
                assert each.dtype == torch.int32 and each.dim() == 1 and each.is_contiguous(), each
                assert each.device.type == "cpu", "plan would wait for the device"
            chunks = len(qo_indptr) - 1
            assert chunks == len(paged_kv_indptr) - 1 == len(paged_kv_last_page_len) >= 1
            assert qo_indptr[0] == paged_kv_indptr[0] == 0 and len(paged_kv_indices) == paged_kv_indptr[-1]
            assert (qo_indptr.diff() > 0).all() and (paged_kv_indptr.diff() > 0).all()
            assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
            assert num_qo_heads % num_kv_heads == 0 and head_dim_qk in (64, 128, 256)
            assert q_data_type in (torch.float16, torch.bfloat16) and kv_data_type == q_data_type
            assert causal and disable_split_kv and window_left >= -1 and (logits_soft_cap or 0.0) >= 0.0
            contexts = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            assert (contexts >= qo_indptr.diff()).all(), "rows before the sequence's first"
            self._plan = {name: value for name, value in locals().items() if name not in ("self", "arrays")}
            calls.plans.append(self._plan)

        def run(
            self,
            q: torch.Tensor,
            paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
            *args: Any,
            out: torch.Tensor | None = None,
        ) -> torch.Tensor:
            plan, (keys, values) = self._plan, paged_kv_cache
            assert plan is not None, "plan info is not initialized"
            calls.num_runs += 1
            heads, kv_heads, dim, size = (
                plan[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")
            )
            assert q.shape == (int(plan["qo_indptr"][-1]), heads, dim) and q.stride(2) == 1, q.shape
            assert all(stride * q.element_size() % 16 == 0 for stride in q.stride()[:2]), q.stride()
            assert q.dtype == plan["q_data_type"] and keys.dtype == plan["kv_data_type"]
            assert keys.shape[1:] == values.shape[1:] == (kv_heads, size, dim), keys.shape
            assert keys.stride() == values.stride() and keys.stride(3) == 1
            assert keys.stride(0) < 1 << 32, "it is kept in 32 bits"
            assert out is not None and out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
            rows, pages = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
            for chunk, context in enumerate(plan["contexts"].tolist()):
                blocks = plan["paged_kv_indices"][pages[chunk] : pages[chunk + 1]].long()
                own = q[rows[chunk] : rows[chunk + 1]]
                out[rows[chunk] : rows[chunk + 1]] = _attend(own, keys[blocks], values[blocks], context, plan)
            return out

    return BatchPrefillWithPagedKVCacheWrapper


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, plan: dict[str, Any]
) -> torch.Tensor:
    """Rows q (n, heads, d), the last of a context whose pages are keys and values."""
    group, window = q.shape[1] // keys.shape[1], plan["window_left"]
    dense = [
        each.transpose(1, 2).flatten(0, 1)[:context].float().repeat_interleave(group, dim=1).transpose(0, 1)
        for each in (keys, values)
    ]
    scores = q.float().transpose(0, 1) @ dense[0].transpose(1, 2)  # (heads, n, context)
    scores *= plan["sm_scale"] or 1 / math.sqrt(q.shape[2])
    if plan["logits_soft_cap"]:
        scores = torch.tanh(scores / plan["logits_soft_cap"]) * plan["logits_soft_cap"]
    at = torch.arange(context, device=q.device)
    row = at[context - len(q) :, None]
    sees = at <= row
    if window >= 0:
        sees &= at >= row - window
    weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
    begin = 0 if window < 0 else max(0, context - len(q) - window) // _GROUP * _GROUP
    is_read = (at >= begin) | (at < _GROUP)
    return (weights[:, :, is_read] @ dense[1][:, is_read]).transpose(0, 1).to(q.dtype)
