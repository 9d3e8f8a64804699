"""What the engine benchmark tells while it runs, and the rows that others read from its last line."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.engine import OURS, Bench, rows_of
from benchmarks.subjects import Prompts, SubjectFailed
from benchmarks.works import Kind, Work
from cluster.bench.roofs import RoofMeter
from tests.unit.benchmarks.test_works import BF16, SPEC

WORKS = [
    Work(kind=Kind.DECODE, batch=2, prompt_tokens=16, new_tokens=5),
    Work(kind=Kind.PREFILL, prompt_tokens=32),
    Work(kind=Kind.CACHED, prompt_tokens=32, cached_tokens=16),
]


class Steady:
    """Takes `pace` seconds for a prompt and for every further token."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self.beginnings: list[tuple[list[int], list[int]]] = []

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        return self._pace * new_tokens

    def after_beginning(self, beginning: Sequence[int], prompt: Sequence[int]) -> float:
        self.beginnings.append((list(beginning), list(prompt)))
        return self._pace / 2

    def close(self) -> None:
        pass


class Breaking(Steady):
    """Fails at single prompts."""

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        if len(prompts) == 1:
            raise SubjectFailed("breaking peer: no memory")
        return super().generate(prompts, new_tokens)


class Impossible(Steady):
    """As on a machine that something else holds up: all tokens come before the first."""

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        return self._pace / new_tokens


def test_a_line_per_measurement_and_rows_against_the_better_peer() -> None:
    subjects = {OURS: Steady(0.5), "slow peer": Steady(4.0), "fast peer": Steady(1.0)}
    bench = Bench({**subjects}, WORKS, SPEC.vocab_size, RoofMeter(read_bytes=1 << 20))
    lines = [line for _ in range(2) for line in bench.run()]
    assert lines[:3] == [
        "decode b2: tandem 4.0 tok/s",
        "decode b2: slow peer 0.5 tok/s",
        "decode b2: fast peer 2.0 tok/s",
    ]
    assert len(lines) == 2 * len(WORKS) * len(subjects)
    rows = rows_of(bench, WORKS, "tiny", SPEC, BF16)
    assert [set(row) for row in rows] == [
        {"work", "ours", "unit", "best_peer", "peer", "ratio_to_best_peer", "limit", "limit_share"}
    ] * len(WORKS)
    assert [(row["work"], row["ours"], row["unit"], row["best_peer"]) for row in rows] == [
        ("tiny bf16 decode b2", 4.0, "tok/s", 2.0),
        ("tiny bf16 prefill 32", 64.0, "tok/s", 32.0),
        ("tiny bf16 ttft 32 cached 16", 250.0, "ms", 500.0),
    ]
    assert {(row["peer"], row["ratio_to_best_peer"]) for row in rows} == {("fast peer", 2.0)}


def test_every_prompt_is_fresh_and_starts_with_what_was_cached() -> None:
    ours = Steady(1.0)
    bench = Bench({OURS: ours}, WORKS[2:], SPEC.vocab_size, RoofMeter(read_bytes=1 << 20))
    for _ in range(3):
        list(bench.run())
    assert all(prompt[:16] == beginning and len(prompt) == 32 for beginning, prompt in ours.beginnings)
    assert len({tuple(prompt) for _, prompt in ours.beginnings}) == 3


def test_times_that_make_no_sense_are_no_figures() -> None:
    bench = Bench({OURS: Impossible(1.0)}, WORKS[:1], SPEC.vocab_size, RoofMeter(read_bytes=1 << 20))
    with pytest.raises(RuntimeError, match="too busy to measure"):
        list(bench.run())


def test_a_peer_that_fails_is_told_and_left_out_and_keeps_its_figures() -> None:
    subjects = {OURS: Steady(0.5), "breaking peer": Breaking(1.0)}
    bench = Bench({**subjects}, WORKS, SPEC.vocab_size, RoofMeter(read_bytes=1 << 20))
    lines = list(bench.run())
    assert [line for line in lines if "LEFT OUT" in line] == [
        "LEFT OUT from here on: breaking peer: no memory"
    ]
    rows = rows_of(bench, WORKS, "tiny", SPEC, BF16)
    assert [(row["work"], row["peer"]) for row in rows] == [("tiny bf16 decode b2", "breaking peer")]


def test_ours_must_not_fail() -> None:
    bench = Bench({OURS: Breaking(1.0)}, WORKS[1:], SPEC.vocab_size, RoofMeter(read_bytes=1 << 20))
    with pytest.raises(SubjectFailed, match="no memory"):
        list(bench.run())
