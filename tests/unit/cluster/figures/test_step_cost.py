"""The cost of a step: its terms one by one, its turn, and its file."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.figures.step_cost import (
    SMOLLM2_ON_SMALL_CPU,
    StepCost,
    StepCostError,
    StepShape,
    causal_pairs,
    load_with_facts,
)

SUM = StepCost(
    overhead_s=1.0, weights_s=8.0, token_s=0.5, row_s=0.25, context_token_s=0.125, pair_s=0.0625, blend=1.0
)


def test_every_term_counts_once() -> None:
    shape = StepShape(prefill_tokens=6, prefill_pairs=32, decode_rows=2, context_tokens=16)
    assert SUM.seconds(shape) == 1.0 + (8.0 + 8 * 0.5) + 2 * 0.25 + 16 * 0.125 + 32 * 0.0625


def test_an_empty_step_costs_nothing() -> None:
    assert SUM.seconds(StepShape()) == 0.0


def test_the_blend_goes_from_sum_to_maximum() -> None:
    shape = StepShape(decode_rows=12)  # products of 6 s beside weights of 8 s
    rest = 1.0 + 12 * 0.25
    assert SUM.seconds(shape) - rest == 14.0
    assert replace(SUM, blend=2.0).seconds(shape) - rest == 10.0
    assert replace(SUM, blend=1e9).seconds(shape) - rest == pytest.approx(8.0, rel=1e-8)


def test_without_products_or_weights_the_other_stays() -> None:
    shape = StepShape(prefill_tokens=4)
    assert replace(SUM, token_s=0.0, blend=3.0).seconds(shape) == 9.0
    assert replace(SUM, weights_s=0.0, blend=3.0).seconds(shape) == 3.0
    assert replace(SUM, weights_s=0.0, token_s=0.0).seconds(shape) == 1.0


@pytest.mark.parametrize(("tokens", "cached", "pairs"), [(1, 0, 1), (4, 0, 10), (4, 8, 42), (0, 5, 0)])
def test_causal_pairs(tokens: int, cached: int, pairs: int) -> None:
    assert causal_pairs(tokens, cached) == pairs == sum(cached + i + 1 for i in range(tokens))


@pytest.mark.parametrize(
    ("tokens", "cached", "step_tokens"), [(10, 0, 4), (8, 0, 4), (10, 3, 4), (3, 0, 512)]
)
def test_a_prompt_costs_what_its_chunks_cost(tokens: int, cached: int, step_tokens: int) -> None:
    chunks, start = 0.0, cached
    while start < tokens:
        size = min(step_tokens, tokens - start)
        chunks += SUM.seconds(StepShape(prefill_tokens=size, prefill_pairs=causal_pairs(size, start)))
        start += size
    assert SUM.prefill_seconds(tokens, cached, step_tokens=step_tokens) == pytest.approx(chunks, rel=1e-12)


def test_a_cached_prompt_costs_nothing() -> None:
    assert SUM.prefill_seconds(10, 10) == 0.0


def test_decode_rate_is_of_the_whole_batch() -> None:
    seconds = SUM.seconds(StepShape(decode_rows=4, context_tokens=40))
    assert SUM.decode_tokens_per_s(4, 10) == 4 / seconds


def test_the_shipped_calibration_gives_the_rates_it_was_made_from() -> None:
    cost = SMOLLM2_ON_SMALL_CPU
    assert cost.decode_tokens_per_s(1, 160) == pytest.approx(112, rel=0.03)
    assert cost.decode_tokens_per_s(8, 160) == pytest.approx(707, rel=0.03)
    assert cost.decode_tokens_per_s(32, 160) == pytest.approx(1115, rel=0.03)
    assert cost.prefill_tokens_per_s(512) == pytest.approx(1474, rel=0.03)
    assert cost.prefill_tokens_per_s(2048) == pytest.approx(1269, rel=0.03)


def test_saved_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "cost.json"
    SUM.save(file, about={"machine": "a test"})
    assert StepCost.load(file) == SUM
    assert load_with_facts(file) == (SUM, {"machine": "a test"})
    assert [found.name for found in file.parent.iterdir()] == ["cost.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "tandem.step-cost.0"}, "calibrate again"),
        ({"cost": None}, "cost is NoneType"),
        ({"cost": {"overhead_s": 1.0}}, "cost lacks"),
        ({"about": []}, "about is list"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "cost.json"
    SUM.save(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(StepCostError, match=message) as caught:
        StepCost.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "value", [-1.0, math.nan, math.inf, 1e308, 10**400, "1", True, None], ids=lambda value: str(value)[:9]
)
def test_unusable_coefficients_are_refused(tmp_path: Path, value: object) -> None:
    file = tmp_path / "cost.json"
    SUM.save(file)
    content = json.loads(file.read_text())
    content["cost"]["row_s"] = value
    file.write_text(json.dumps(content))
    with pytest.raises(StepCostError, match="row_s is"):
        StepCost.load(file)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepCostError, match="tandem bench calibrate"):
        StepCost.load(tmp_path / "missing.json")
