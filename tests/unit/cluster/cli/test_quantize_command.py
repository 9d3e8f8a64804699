"""`tandem model quantize`: what it asks for, what it prints, what it refuses; the work is a fake."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.bench.child import MeasuringFailed
from cluster.bench.orders import Order, QuantizeOrder
from cluster.cli.commands import app
from cluster.cli.services import Services

FOUND = {
    "folder": "/models/small-int4",
    "form": "int4",
    "bytes_before": 269_000_000,
    "bytes_after": 168_000_000,
    "seconds": 3.25,
    "matrices": 211,
    "worst_matrix": "model.layers.1.mlp.down_proj.weight",
    "worst_error": 0.0912,
    "mean_error": 0.0514,
    "perplexity": {"tokens": 2000, "before": 20.0, "after": 20.3, "ratio": 1.015},
}


class Command:
    """The command with a fake behind it."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.result: Mapping[str, Any] | MeasuringFailed = FOUND

    def measure(self, order: Order, report: Callable[[str], None], *, timeout_s: float) -> Mapping[str, Any]:
        report("file 1 of 1")
        self.orders.append(order)
        if isinstance(self.result, MeasuringFailed):
            raise self.result
        return self.result

    def run(self, *arguments: str) -> Result:
        services = Services(measure=self.measure)
        return CliRunner().invoke(app, ["model", "quantize", *arguments], obj=services)


@pytest.fixture
def command() -> Command:
    return Command()


def test_the_report(command: Command, tiny_model: Path, tmp_path: Path) -> None:
    done = command.run(str(tiny_model), "--to", "int4", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.stderr
    assert command.orders == [
        QuantizeOrder(model=str(tiny_model), form="int4", out=str(tmp_path / "out"), has_report=True)
    ]
    assert [line.strip().split(maxsplit=1) for line in done.stdout.splitlines() if "error" not in line] == [
        ["folder", "/models/small-int4"],
        ["weights", "269.0 MB -> 168.0 MB (62%)"],
        ["perplexity", "20.00 -> 20.30 (+1.5%) on 2,000 tokens"],
        ["time", "3.2 s to write"],
    ]
    assert "largest error  9.12% of model.layers.1.mlp.down_proj.weight" in done.stdout
    assert "mean error     5.14% over 211 matrices" in done.stdout


def test_as_json_and_without_a_report(command: Command, tiny_model: Path, tmp_path: Path) -> None:
    command.result = {**FOUND, "perplexity": None}
    arguments = [str(tiny_model), "--to", "int8", "--out", str(tmp_path / "out"), "--no-report"]
    assert json.loads(command.run(*arguments, "--json").stdout) == {**FOUND, "perplexity": None}
    assert "not measured" in command.run(*arguments).stdout
    assert all(isinstance(order, QuantizeOrder) and not order.has_report for order in command.orders)


def test_refusals(command: Command, tiny_model: Path, tmp_path: Path) -> None:
    other = command.run(str(tiny_model), "--to", "int3", "--out", str(tmp_path / "out"))
    assert (other.exit_code, other.stderr) == (2, "error: --to 'int3': it is one of int8, int4\n")
    absent = command.run(str(tmp_path / "absent"), "--to", "int8", "--out", str(tmp_path / "out"))
    assert absent.exit_code == 2 and "does not exist" in absent.stderr
    assert command.orders == []
    command.result = MeasuringFailed("out exists and is not an empty folder")
    failed = command.run(str(tiny_model), "--to", "int8", "--out", str(tmp_path / "out"))
    assert failed.exit_code == 1 and "is not an empty folder" in failed.stderr
