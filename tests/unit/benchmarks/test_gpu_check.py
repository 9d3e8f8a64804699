"""What the GPU check makes of its parts, whatever becomes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import Part, part_names, run_part, summarise, write
from benchmarks.gpu_check.findings import Finding, Kind, read
from benchmarks.gpu_check.settings import Settings

RIGHT = Finding(kind=Kind.CHECK, name="a", detail="b", values={"c": 1.5})
WRONG = Finding(kind=Kind.CHECK, name="a", is_met=False, values={})
MISSED = Finding(kind=Kind.TARGET, name="speed", is_met=False, values={})


def part(*findings: Finding, has_ended: bool = True) -> Part:
    return Part(name="kernels", seconds=1.0, has_ended=has_ended, findings=list(findings), error="")


def test_lines_come_back_as_they_were_said() -> None:
    lines = [RIGHT.to_line(), "a library says something", "[1]", MISSED.to_line(), RIGHT.to_line()[:20]]
    assert read(lines) == [RIGHT, MISSED]


@pytest.mark.parametrize(
    ("parts", "is_right"),
    [
        ([part(RIGHT)], True),
        ([part(RIGHT, MISSED)], True),
        ([part(RIGHT), part(RIGHT, WRONG)], False),
        ([part(RIGHT, has_ended=False), part(RIGHT)], False),
    ],
)
def test_a_wrong_check_or_a_part_that_does_not_end_is_a_failure(parts: list[Part], is_right: bool) -> None:
    assert summarise(parts, 3.0) is is_right


def test_each_part_is_run_once() -> None:
    everything = ["kernels", "llama", "repeat", "ranks", "mistral", "flashinfer"]
    assert part_names(None, has_model=False) == everything
    assert part_names(None, has_model=True) == [*everything, "model"]
    assert part_names(["model", "ranks", "ranks"], has_model=True) == ["model", "ranks"]
    assert part_names(["ranks"], has_model=True) == ["ranks", "model"]


def test_a_part_that_raises_says_why(tmp_path: Path) -> None:
    found = run_part("model", Settings(is_dry=True, folder=str(tmp_path / "model")), 60.0)
    assert not found.is_good and found.findings == []
    assert "Error" in found.error.splitlines()[-1]


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    found = run_part("repeat", Settings(is_dry=True, folder=str(tmp_path / "repeat")), 0.1)
    assert not found.is_good and found.seconds < 10.0
    assert found.error.startswith("stopped after 0 s")


def test_everything_is_written(tmp_path: Path) -> None:
    write(tmp_path / "out.json", [part(RIGHT, MISSED)], 3.0, is_dry=True)
    record = json.loads((tmp_path / "out.json").read_text())
    assert set(record["versions"]) == {"torch", "triton", "transformers", "numpy"}
    assert [each["kind"] for each in record["parts"][0]["findings"]] == ["check", "target"]
