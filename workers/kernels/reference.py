"""The torch form of every kernel: any device and dtype, the measure of all others in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.kernels.batch import StepBatch
from workers.kernels.draw import NOT_FINITE, Draw, draw_ids
from workers.kernels.interface import (
    FusedGuesses,
    FusedStep,
    GuessModel,
    PackedLinear,
    PartLinear,
    StepModel,
)
from workers.kernels.order import SumOrder
from workers.kernels.paged_cache import LayerCache, dequantize_rows, quantize_rows
from workers.kernels.quantized import QuantizedWeight, quantize
from workers.weight_forms import Quantization

MAX_SCORES = 1 << 26  # elements of one padded score tensor; more sequences are taken in turn


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A linear layer that keeps the weight as it came."""

    weight: torch.Tensor  # (out, in)
    bias: torch.Tensor | None
    out_dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).to(self.out_dtype)


@dataclass(frozen=True, slots=True)
class TorchPart:
    """A rank's part of a row-parallel layer."""

    weight: torch.Tensor  # (out, in)
    order: SumOrder

    def nodes(self, x: torch.Tensor) -> torch.Tensor:
        sums: list[torch.Tensor] = []
        widths = list(self.order.widths)
        rows = torch.split_with_sizes(x, widths, dim=-1)
        columns = torch.split_with_sizes(self.weight, widths, dim=1)
        for row, column, joins in zip(rows, columns, self.order.joins, strict=True):
            total = F.linear(row.float(), column.float())
            for _ in range(joins):
                total = sums.pop() + total
            sums.append(total)
        return torch.stack(sums)


class TorchKernels:
    """Implements `workers.kernels.interface.Kernels` with torch operators."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

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
        if cos is not None and sin is not None:
            q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        slots = batch.slots
        if bool((slots < 0).any()):  # padding
            is_real = slots >= 0
            slots, k, v = slots[is_real], k[is_real], v[is_real]
        block, offset = slots // cache.block_size, slots % cache.block_size
        if cache.scales is not None:
            key_scales, value_scales = cache.scales
            cache.keys[block, :, offset], key_scales[block, :, offset] = quantize_rows(k)
            cache.values[block, :, offset], value_scales[block, :, offset] = quantize_rows(v)
        else:
            cache.keys[block, :, offset] = k.to(cache.keys.dtype)
            cache.values[block, :, offset] = v.to(cache.values.dtype)
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
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.shape[0] == 0:
            return out
        query_lens = batch.query_starts.diff()
        for sequences in _groups(query_lens, q.shape[1] * batch.max_context_len):
            rows, valid = _padded_rows(batch, query_lens, sequences)
            tables = batch.block_tables[sequences].long()
            queries = q[rows].float().transpose(1, 2)  # (s, heads, Q, d)
            context = tables.shape[1] * cache.block_size
            mask = _visible(batch.positions[rows], context, sliding_window)
            if batch.parents is not None:
                for place, sequence in enumerate(sequences):
                    seen = _visible_in_tree(batch, sequence, context, sliding_window)
                    mask[place, : len(seen)] = seen
            unseen = ~mask.any(1)
            keys = _gather(cache.keys, cache.key_scales, tables, unseen)
            values = _gather(cache.values, cache.value_scales, tables, unseen)
            mask = mask[:, None]
            group = queries.shape[1] // keys.shape[1]
            keys = keys.repeat_interleave(group, dim=1)
            values = values.repeat_interleave(group, dim=1)
            scores = (queries @ keys.transpose(2, 3)) * scale
            if soft_cap is not None:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            found = (weights @ values).transpose(1, 2).to(q.dtype)  # (s, Q, heads, d)
            out[rows[valid]] = found[valid]
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def gelu_new(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw], *, only_finite: bool = False) -> list[int]:
        ids: list[int] = (self.draw_ids(logits, draws) if only_finite else draw_ids(logits, draws)).tolist()
        return ids

    def draw_ids(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        is_finite = logits.sum(-1).isfinite()  # a NaN or an infinity makes the sum one
        ids = draw_ids(logits.masked_fill(~is_finite[:, None], 0.0), draws)
        return ids.masked_fill(~is_finite, NOT_FINITE)

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        quantization: Quantization = Quantization.NONE,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        if quantization is not Quantization.NONE:
            return self.pack_quantized(quantize(weight, quantization), bias, weight.dtype, out_dtype, order)
        return TorchLinear(weight, bias, out_dtype or weight.dtype)

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        return TorchLinear(weight.values().to(dtype), bias, out_dtype or dtype)

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        return TorchPart(weight if isinstance(weight, torch.Tensor) else weight.values().to(dtype), order)

    def fuse(self, model: StepModel) -> FusedStep | None:
        return None

    def fuse_guesses(self, model: GuessModel) -> FusedGuesses | None:
        return None


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (T, heads, d) with its first rot elements turned as pairs (i, i + rot / 2); cos, sin (T, rot / 2)."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)


def _groups(query_lens: torch.Tensor, scores_per_query: int) -> list[list[int]]:
    """Sequences that share a padded pass: all decode rows together, prompt chunks within MAX_SCORES."""
    lens: list[int] = query_lens.tolist()
    groups: list[list[int]] = []
    widest = 0
    for sequence in sorted((s for s, n in enumerate(lens) if n > 0), key=lambda s: lens[s]):
        widest = max(widest, lens[sequence])
        grown = len(groups[-1]) + 1 if groups else 1
        if groups and (widest == 1 or grown * widest * scores_per_query <= MAX_SCORES):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups


def _padded_rows(
    batch: StepBatch, query_lens: torch.Tensor, sequences: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers (s, Q) of the sequences, short ones filled with their first row, and which are real."""
    chosen = torch.tensor(sequences, device=query_lens.device)
    lens, starts = query_lens[chosen], batch.query_starts[chosen]
    column = torch.arange(int(lens.max()), device=lens.device)
    valid = column[None] < lens[:, None]
    rows = starts[:, None] + torch.where(valid, column[None], 0)
    return rows.long(), valid


def _gather(
    rows: torch.Tensor, scales: torch.Tensor | None, tables: torch.Tensor, unseen: torch.Tensor
) -> torch.Tensor:
    """Pages of the block tables (s, W) as (s, kv_heads, W * block_size, d), float32; zero where no row of the
    sequence sees them: unseen (s, W * block_size).

    What another sequence left there may be NaN or infinite, which a probability of 0 would not cancel.
    """
    read = rows[tables].float() if scales is None else dequantize_rows(rows[tables], scales[tables])
    pages = read.transpose(1, 2).flatten(2, 3)
    return pages.masked_fill_(unseen[:, None, :, None], 0.0)


def _visible(positions: torch.Tensor, context: int, sliding_window: int | None) -> torch.Tensor:
    """(s, Q, context): which positions a row at positions (s, Q) attends to."""
    at = torch.arange(context, device=positions.device)
    seen = at <= positions[..., None]
    if sliding_window is not None:
        seen &= at > positions[..., None] - sliding_window
    return seen


def _visible_in_tree(
    batch: StepBatch, sequence: int, context: int, sliding_window: int | None
) -> torch.Tensor:
    """(rows of the sequence, context): which slots each of its rows attends to. The last slots are those of
    the rows themselves."""
    assert batch.parents is not None, "no slice is a tree"
    first, end = batch.query_starts[sequence : sequence + 2].tolist()
    before = int(batch.context_lens[sequence]) - (end - first)
    positions = batch.positions[first:end]
    at = torch.arange(context, device=positions.device)  # position of each slot
    at[before : before + end - first] = positions
    seen = torch.zeros((end - first, context), dtype=torch.bool, device=positions.device)
    seen[:, :before] = True
    for row, parent in enumerate(batch.parents[first:end].tolist()):
        if row:
            seen[row, before:] = seen[parent, before:]
        seen[row, before + row] = True
    if sliding_window is not None:
        seen &= at > positions[:, None] - sliding_window
    return seen
