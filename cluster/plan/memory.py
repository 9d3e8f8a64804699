"""What one rank keeps in memory, each part with its formula, and how many requests its KV pool holds.

    device = reserve + allocator + weights + activations + temporary buffers + KV pool

The pool's size is the engine's own (`workers.runtime.pool_size`): rank 0, whose share is never the smallest,
stands for all. Activations and buffers are what the C++ step allocates (`workers/kernels/cpu/step.h`); on a
GPU torch allocates as much or somewhat more, which is what its allocator's share is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.figures.number_formats import element_bytes
from cluster.plan.arithmetic import PLAIN, kv_bytes_per_token, weight_bytes
from cluster.plan.devices import Device
from cluster.plan.models import PlannedModel
from workers.config import CacheConfig, ScheduleConfig
from workers.kv_format import INT8, NUMBER_BYTES, SCALE_BYTES, kv_dtype
from workers.model.shares import expert_cuts
from workers.runtime.errors import PoolTooSmall
from workers.runtime.pool_size import FreeMemory, bytes_per_block, num_blocks_for
from workers.weight_forms import Quantization, WeightForms

_KEPT_LOGIT_ROWS = 128  # as workers.kernels.memory.MAX_KEPT_ROWS; logits are float32


class DoesNotFit(ValueError):
    """The device is too small for the model, or for one request. The text says what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the model is to run."""

    context: int = 2048  # longest context of a request, tokens
    dtype: str = "bfloat16"
    quantization: str = "none"  # as `model.quantization`
    forms: WeightForms = PLAIN  # what that makes of the model
    tensor_parallel: int = 1
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.dtype)

    @property
    def kv_dtype(self) -> str:
        """In which keys and values lie in the pool."""
        return kv_dtype(self.cache.dtype, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One use of memory."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of a rank."""

    parts: Sequence[MemoryPart]  # all but the pool, whose part is last
    kv_bytes_per_token: int  # of the whole model
    block_bytes: int  # of this rank
    num_blocks: int
    block_size: int
    context: int
    cache: CacheConfig  # with the memory_fraction that the pool was planned with
    cap: str  # what keeps the pool smaller than free memory would allow; empty where nothing does

    @property
    def num_requests(self) -> int:
        """Requests of the full context that the pool holds at the same time."""
        return self.num_blocks // -(-self.context // self.block_size)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def plan_memory(model: PlannedModel, device: Device, shape: Shape) -> MemoryPlan:
    """Raises DoesNotFit."""
    fixed = _fixed_parts(model, device, shape)
    weights = sum(part.num_bytes for part in fixed if part.name in ("weights", "reserve"))
    working = sum(part.num_bytes for part in fixed) - weights
    free = device.memory_bytes - weights
    spec, cache = model.spec, shape.cache
    kv_heads = len(spec.kv_heads_of_rank(0, shape.tensor_parallel))
    block_bytes = bytes_per_block(spec, kv_heads, cache.block_size, shape.kv_dtype)
    if free <= working:
        raise DoesNotFit(
            f"{model.name} needs {_gib(weights + working)} GiB on a rank before any KV cache, {device.name} "
            f"has {_gib(device.memory_bytes)} GiB: use more ranks (--tensor-parallel), fewer bits "
            "(--quantization) or a larger device"
        )
    if device.is_gpu:
        # The engine leaves free what steps take, and then has a share of the rest: all but the allocator's.
        kept = free - working
        free = kept + device.allocator_bytes
        if cache.num_blocks is None:
            cache = replace(cache, memory_fraction=_floor(kept / free, 4))
    try:
        num_blocks = num_blocks_for(
            cache,
            shape.schedule,
            block_bytes=block_bytes,
            max_model_len=shape.context,
            free=FreeMemory(
                num_bytes=free,
                num_sharers=1 if device.is_gpu else shape.tensor_parallel,
                is_host=not device.is_gpu,
            ),
        )
    except PoolTooSmall as error:
        raise DoesNotFit(f"{model.name} on {device.name}: {error}") from error
    pool = MemoryPart(
        name="KV pool",
        num_bytes=num_blocks * block_bytes,
        formula=f"{num_blocks:,} blocks x {cache.block_size} tokens x 2 x L {spec.num_layers} x K {kv_heads} "
        f"x {row_formula(spec.head_dim, shape.kv_dtype)}",
    )
    return MemoryPlan(
        parts=(*fixed, pool),
        kv_bytes_per_token=kv_bytes_per_token(spec, dtype=shape.kv_dtype),
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        context=shape.context,
        cache=cache,
        cap=_cap(cache, shape, num_blocks, free=free, block_bytes=block_bytes, is_gpu=device.is_gpu),
    )


def row_formula(head_dim: int, dtype: str) -> str:
    """Bytes of the keys of a token and head, in words."""
    if dtype == INT8:
        return f"(D {head_dim} x {NUMBER_BYTES[dtype]} B + scale {SCALE_BYTES} B)"
    return f"D {head_dim} x {NUMBER_BYTES[dtype]} B"


def _cap(
    cache: CacheConfig, shape: Shape, num_blocks: int, *, free: int, block_bytes: int, is_gpu: bool
) -> str:
    """What has kept the pool from taking all that it may; see `workers.runtime.pool_size`."""
    if cache.num_blocks is not None:
        return "cache.num_blocks"
    sharers = 1 if is_gpu else shape.tensor_parallel
    budget = int(free * cache.memory_fraction)
    allowed = budget if is_gpu else min(budget, cache.max_bytes)
    if num_blocks < allowed // sharers // block_bytes:
        return (
            "the engine's rule: four times what max_running requests of the full context hold is enough, "
            "more would only remember old prefixes"
        )
    if allowed < budget:
        return f"cache.max_bytes, {_gib(cache.max_bytes)} GiB by default"
    return ""


def _fixed_parts(model: PlannedModel, device: Device, shape: Shape) -> list[MemoryPart]:
    spec, size, element = model.spec, shape.tensor_parallel, shape.element_bytes
    weights = weight_bytes(
        spec,
        is_tied=model.is_tied,
        element_bytes=element,
        forms=shape.forms,
        tensor_parallel=size,
    )
    bits = {
        Quantization.NONE: f"{element} B",
        Quantization.INT8: "1 B + scales",
        Quantization.INT4: "5 bits",
    }[shape.forms.layers]
    whole = f"{model.num_parameters:,} parameters x {bits}"
    queries, keys = len(spec.q_heads_of_rank(0, size)), len(spec.kv_heads_of_rank(0, size))
    vocab, experts = len(spec.vocab_of_rank(0, size)), spec.experts
    inner = len(spec.intermediate_of_rank(0, size)) if spec.num_dense_layers else 0
    wide = 4
    if experts is not None:
        inner = max(inner, experts.intermediate_size)
        # Sums of experts that wait for others, and what one gives, in float32.
        wide += 2 * ((len(expert_cuts(experts.num_experts)) - 2).bit_length() + 2)
    row = wide * spec.hidden_size + (2 * queries + 2 * keys) * spec.head_dim + 3 * inner
    tokens = shape.schedule.max_step_tokens
    logit_rows = min(shape.schedule.max_running, _KEPT_LOGIT_ROWS)
    turning = sum(rotary.dim for rotary in spec.rotaries)
    turns = spec.max_model_len * turning * 4
    head_copy = 0
    if not device.is_gpu and model.is_tied and shape.forms.head is Quantization.NONE:
        head_copy = vocab * spec.hidden_size * element
    parts = [
        MemoryPart(name="reserve", num_bytes=device.reserve_bytes, formula="driver and libraries"),
        MemoryPart(name="allocator", num_bytes=device.allocator_bytes, formula="kept beside live tensors"),
        MemoryPart(
            name="weights", num_bytes=weights, formula=whole if size == 1 else f"rank 0 of {size}: {whole}"
        ),
        MemoryPart(
            name="activations",
            num_bytes=tokens * row * element,
            formula=f"{tokens} step tokens x ({wide} H + (2 A + 2 K) D + 3 F = {row:,}) x {element} B",
        ),
        MemoryPart(
            name="temporary buffers",
            num_bytes=logit_rows * spec.vocab_size * 4 + turns + head_copy,
            formula=f"logits {logit_rows} x V {spec.vocab_size:,} x 4 B"
            + (f" + rotary {spec.max_model_len:,} x {turning} x 4 B" if turning else "")
            + (f" + packed head {vocab:,} x {spec.hidden_size} x {element} B" if head_copy else ""),
        ),
    ]
    return [part for part in parts if part.num_bytes]


def _floor(value: float, digits: int) -> float:
    scale = 10.0**digits
    return math.floor(value * scale) / scale


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
