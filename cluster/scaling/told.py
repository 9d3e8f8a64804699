"""Targets and step cost as the numbers that groups tell of their deployment, beside their load, and back.

So they stand in the config tree alone, and the policy in Serve's controller learns them from the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from cluster.figures.step_cost import StepCost
from cluster.scaling.targets import ScalingTargets

_NO_RATIO = -1.0
_TARGET, _COST = "target_", "cost_"  # prefixes


def told_numbers(targets: ScalingTargets, cost: StepCost) -> dict[str, float]:
    """What groups tell of their deployment, beside their load."""
    values = asdict(targets)
    del values["step_cost"]
    if values["prefill_per_decode"] is None:
        values["prefill_per_decode"] = _NO_RATIO
    return {
        **{_TARGET + name: float(value) for name, value in values.items()},
        **{_COST + name: float(value) for name, value in asdict(cost).items()},
    }


def deployment_of(numbers: Mapping[str, float]) -> tuple[ScalingTargets, StepCost] | None:
    """The deployment that a group tells of; None when a group tells none of it."""
    names = [entry.name for entry in fields(ScalingTargets) if entry.name != "step_cost"]
    if any(_TARGET + name not in numbers for name in names):
        return None
    values: dict[str, Any] = {name: numbers[_TARGET + name] for name in names}
    if values["prefill_per_decode"] == _NO_RATIO:
        values["prefill_per_decode"] = None
    cost = StepCost(**{entry.name: numbers[_COST + entry.name] for entry in fields(StepCost)})
    return ScalingTargets(**values), cost
