"""The KV pool as it is planned beside the one that an engine made of the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.bench.orders import EngineSettings
from cluster.figures.number_formats import model_dtype
from cluster.plan.devices import Roofs, this_machine
from cluster.plan.memory import Shape, plan_memory
from cluster.plan.models import find_model
from workers.config import CacheConfig, ScheduleConfig

_ANY_ROOFS = Roofs(read_bytes_per_s=1.0, flop_per_s=1.0)  # memory does not depend on them


def pool_row(folder: Path, settings: EngineSettings, found: Mapping[str, Any]) -> dict[str, Any]:
    """Planned and measured blocks. found: `pool` of a calibration, with the memory that was free before.

    Raises DoesNotFit.
    """
    model = find_model(str(folder))
    dtype = model_dtype(settings.dtype)
    shape = Shape(
        context=model.spec.max_model_len,
        dtype=dtype,
        quantization=settings.quantization,
        forms=model.forms(settings.quantization, dtype),
        tensor_parallel=settings.tensor_parallel,
        cache=CacheConfig(max_bytes=settings.max_bytes, block_size=found["block_size"]),
        schedule=ScheduleConfig(max_running=settings.max_running, max_step_tokens=settings.max_step_tokens),
    )
    device = replace(this_machine(_ANY_ROOFS, source=""), memory_bytes=int(found["free_before_bytes"]))
    planned = plan_memory(model, device, shape).num_blocks
    measured = int(found["num_blocks"])
    return {"planned_blocks": planned, "measured_blocks": measured, "error": round(planned / measured - 1, 4)}
