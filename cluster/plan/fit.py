"""Coefficients of a StepCost from measured steps, and how well they describe them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.figures.step_cost import StepCost, StepShape

_BLENDS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
_NAMES = ("overhead_s", "weights_s", "token_s", "row_s", "context_token_s", "pair_s")
_START = (3e-4, 5e-3, 5e-4, 5e-5, 1e-6, 1e-7)  # the order of magnitude of a small machine
_LEAST_S = 1e-12  # a coefficient below it is none
_MAX_ROUNDS = 200
_TOLERANCE = 1e-10

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A kind of step and what it took."""

    shape: StepShape
    seconds: float


def fit(samples: Sequence[Sample]) -> StepCost:
    """The cost with the least squares of relative errors, over the coefficients and some blends.

    Needs decode steps of several batches and contexts and prefill steps of several lengths, else some
    coefficients are arbitrary. Raises ValueError for fewer samples than coefficients.
    """
    if len(samples) < len(_NAMES):
        raise ValueError(f"{len(samples)} samples cannot tell {len(_NAMES)} coefficients apart")
    if any(not sample.seconds > 0 for sample in samples):
        raise ValueError("a step that took no time is no measurement")
    found = [_fit_blend(samples, blend) for blend in _BLENDS]
    return min(found, key=lambda pair: pair[0])[1]


def residuals(cost: StepCost, samples: Sequence[Sample]) -> list[float]:
    """Of each sample, predicted over measured less 1."""
    return [cost.seconds(sample.shape) / sample.seconds - 1.0 for sample in samples]


def _fit_blend(samples: Sequence[Sample], blend: float) -> tuple[float, StepCost]:
    measured = np.log([sample.seconds for sample in samples])

    def errors(logs: Vector) -> Vector:
        cost = _cost(logs, blend)
        predicted: Vector = np.log([cost.seconds(sample.shape) for sample in samples])
        return predicted - measured

    logs = _least_squares(errors, np.log(_START))
    return float(np.sum(errors(logs) ** 2)), _cost(logs, blend)


def _cost(logs: Vector, blend: float) -> StepCost:
    values = [float(value) if value >= _LEAST_S else 0.0 for value in np.exp(logs)]
    overhead, weights, token, row, context, pair = values
    return StepCost(
        overhead_s=overhead,
        weights_s=weights,
        token_s=token,
        row_s=row,
        context_token_s=context,
        pair_s=pair,
        blend=blend,
    )


def _least_squares(errors: Callable[[Vector], Vector], start: Vector) -> Vector:
    """Levenberg-Marquardt (Marquardt 1963) with a numerical derivative. Logarithms of the coefficients keep
    them positive, and one that is not needed drifts to nothing."""
    point, damping = start, 1e-2
    current = errors(point)
    total = float(current @ current)
    for _ in range(_MAX_ROUNDS):
        slopes = np.stack([(errors(point + 1e-5 * axis) - current) / 1e-5 for axis in np.eye(len(point))], 1)
        normal, gradient = slopes.T @ slopes, slopes.T @ current
        while damping < 1e12:
            step = np.linalg.solve(
                normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(point))), -gradient
            )
            trial: Vector = point + np.clip(step, -2.0, 2.0)
            moved = errors(trial)
            if (reached := float(moved @ moved)) < total:
                break
            damping *= 4
        else:
            return point
        gained = total - reached
        point, current, total, damping = trial, moved, reached, max(damping / 4, 1e-9)
        if gained <= _TOLERANCE * (total + _TOLERANCE):
            return point
    return point
