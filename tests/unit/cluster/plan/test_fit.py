"""The fit finds the coefficients that steps were made from, and stays sensible when they are disturbed."""

import random
from dataclasses import replace

import pytest

from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU, StepCost, StepShape, causal_pairs
from cluster.plan.fit import Sample, fit, residuals

SHAPES = [
    *(
        StepShape(decode_rows=batch, context_tokens=batch * context)
        for batch, context in ((1, 128), (1, 1024), (4, 128), (8, 128), (8, 1024), (32, 128), (128, 32))
    ),
    *(StepShape(prefill_tokens=n, prefill_pairs=causal_pairs(n)) for n in (16, 64, 128, 256, 512)),
    *(StepShape(prefill_tokens=512, prefill_pairs=causal_pairs(512, n)) for n in (512, 1024, 1536)),
    StepShape(prefill_tokens=400, prefill_pairs=causal_pairs(400), decode_rows=16, context_tokens=2048),
]


def samples_of(cost: StepCost, noise: float = 0.0) -> list[Sample]:
    drawn = random.Random(1)
    return [
        Sample(shape=shape, seconds=cost.seconds(shape) * (1 + drawn.uniform(-noise, noise)))
        for shape in SHAPES
    ]


@pytest.mark.parametrize("blend", [1.5, 2.0, 4.0])
def test_exact_steps_give_their_cost_back(blend: float) -> None:
    made_from = replace(SMOLLM2_ON_SMALL_CPU, blend=blend)
    samples = samples_of(made_from)
    found = fit(samples)
    assert found.blend == blend
    assert max(map(abs, residuals(found, samples))) < 1e-3
    assert found.weights_s == pytest.approx(made_from.weights_s, rel=0.05)
    assert found.token_s == pytest.approx(made_from.token_s, rel=0.01)
    assert found.context_token_s == pytest.approx(made_from.context_token_s, rel=0.01)
    assert found.pair_s == pytest.approx(made_from.pair_s, rel=0.01)


def test_a_machine_of_other_size_is_found_from_the_same_start() -> None:
    fast = StepCost(
        overhead_s=2e-3,
        weights_s=7e-3,
        token_s=4e-5,
        row_s=1e-6,
        context_token_s=3e-7,
        pair_s=2e-9,
        blend=8.0,
    )
    samples = samples_of(fast)
    assert max(map(abs, residuals(fit(samples), samples))) < 0.01


def test_disturbed_steps_are_described_within_the_disturbance() -> None:
    samples = samples_of(SMOLLM2_ON_SMALL_CPU, noise=0.1)
    found = fit(samples)
    assert max(map(abs, residuals(found, samples_of(SMOLLM2_ON_SMALL_CPU)))) < 0.12


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples"):
        fit(samples_of(SMOLLM2_ON_SMALL_CPU)[:5])
    with pytest.raises(ValueError, match="no time"):
        fit([*samples_of(SMOLLM2_ON_SMALL_CPU), Sample(shape=SHAPES[0], seconds=0.0)])
