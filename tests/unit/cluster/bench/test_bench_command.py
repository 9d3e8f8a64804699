"""`tandem bench`: tables, reports and refusals, with measuring and servers that are fakes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.bench.child import MeasuringFailed
from cluster.bench.client import ServedModel, ServerUnusable
from cluster.bench.latency import Outcome
from cluster.bench.load import LoadRun, Server
from cluster.bench.orders import CalibrateOrder, KvCacheOrder, Order, SweepOrder
from cluster.cli.commands import app
from cluster.cli.services import Services
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU
from cluster.plan.calibration import find_calibration
from cluster.running.note import RunningNote

SHORT = ("--prompt", "64", "--output", "32")  # the tiny model takes 128 tokens
CEILINGS = {"read_bytes_per_s": 30e9, "flop_per_s": 400e9, "samples": {}}
ROW = {
    "batch": 8,
    "latency_s": 4.5,
    "ttft_ms": 800.0,
    "ttft_p99_ms": 1500.0,
    "tpot_ms": 12.5,
    "throughput_tokens_per_s": 450.0,
    "decode_tokens_per_s": 640.0,
    "decode_limit_tokens_per_s": 800.0,
    "prefill_tokens_per_s": 1400.0,
    "kv_use": 0.25,
    "read_share": 0.8,
    "flop_share": 0.3,
    "limit_share": 0.8,
    "bound": "bandwidth",
    "is_knee": True,
}


class Bench:
    """The commands with a fake behind them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orders: list[Order] = []
        self.servers: list[Server] = []
        self.result: Mapping[str, Any] | MeasuringFailed = {}
        self.outcomes: list[Outcome] | ServerUnusable = []
        self.max_model_len: int | None = 512

    def measure(self, order: Order, report: Callable[[str], None], *, timeout_s: float) -> Mapping[str, Any]:
        report("measuring")
        self.orders.append(order)
        if isinstance(self.result, MeasuringFailed):
            raise self.result
        return self.result

    def run_load(self, server: Server, make: Any, report: Callable[[str], None]) -> LoadRun:
        self.servers.append(server)
        if isinstance(self.outcomes, ServerUnusable):
            raise self.outcomes
        model = ServedModel(name="m", max_model_len=self.max_model_len)
        self.sent = list(make(model))
        return LoadRun(model, self.outcomes)

    def run(self, *arguments: str) -> Result:
        services = Services(
            measure=self.measure, run_load=self.run_load, note=RunningNote(self.folder / "run")
        )
        return CliRunner().invoke(app, ["bench", *arguments], obj=services)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Bench(tmp_path)


def sweep_report(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "sweep",
        "rows": [{**ROW, **changes}],
        "config": {"model": "m"},
        "load": {"prompt_tokens": 512, "new_tokens": 256},
        "ceilings": CEILINGS,
        "samples": {"8": []},
        "machine": {},
    }


def test_sweep(bench: Bench, tiny_model: Path, tmp_path: Path) -> None:
    bench.result = sweep_report()
    out = tmp_path / "sweep.json"
    done = bench.run("sweep", str(tiny_model), *SHORT, "--batches", "8,1,8", "-o", str(out))
    assert done.exit_code == 0, done.stderr
    (order,) = bench.orders
    assert isinstance(order, SweepOrder)
    assert (order.batches, order.prompt_tokens, order.new_tokens) == ((1, 8), 64, 32)
    assert order.engine.max_running == 8 and order.engine.model == str(tiny_model)
    line = next(line for line in done.stdout.splitlines() if line.strip().startswith("8 "))
    assert line.split() == [
        *("8", "4.50", "800", "1500", "12.5", "450", "640", "800", "1400"),
        *("25", "%", "80", "%", "30", "%", "bandwidth", "knee"),
    ]
    assert json.loads(out.read_text())["rows"][0]["batch"] == 8
    assert "samples" not in json.loads(bench.run("sweep", str(tiny_model), *SHORT, "--json").stdout)


def test_a_report_with_a_number_that_json_lacks_is_not_written(
    bench: Bench, tiny_model: Path, tmp_path: Path
) -> None:
    bench.result = {**sweep_report(), "samples": {"8": [float("nan")]}}
    out = tmp_path / "sweep.json"
    done = bench.run("sweep", str(tiny_model), *SHORT, "-o", str(out))
    assert done.exit_code == 1 and not out.exists()
    assert f"error: {out}: the report cannot be said in JSON: Out of range float values" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep", "--dtype", "float16"), "--dtype 'float16': it is one of auto, bfloat16, float32"),
        (("sweep", "--quantization", "int2", *SHORT), "--quantization 'int2': it is one of auto, none"),
        (("sweep", "--prompt", "9000"), "--prompt 9,000 and --output 256 are 9,256 tokens together"),
        (("sweep", *SHORT, "--tensor-parallel", "3"), "--tensor-parallel 3: "),
        (("sweep", "--prompt", "9" * 23), "Invalid value for '--prompt'"),
        (("kv-cache", "--prompt", "100"), "the model takes at most 128"),
        (("serve", "--rate", "0"), "--rate '0'"),
    ],
)
def test_mistakes_are_found_before_anything_is_started(
    bench: Bench, tiny_model: Path, arguments: tuple[str, ...], message: str
) -> None:
    model = () if arguments[0] == "serve" else (str(tiny_model),)
    done = bench.run(arguments[0], *model, *arguments[1:])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert message in done.stderr and not bench.orders


def test_a_report_that_cannot_be_written_is_told_first(
    bench: Bench, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for option in ("-o", "--png"):
        done = bench.run("sweep", str(tiny_model), *SHORT, option, str(tmp_path / "file" / "new" / "a.json"))
        assert done.exit_code == 1 and "its folder cannot be made: Not a directory" in done.stderr
    assert not bench.orders


def test_a_row_above_its_limit_is_told(bench: Bench, tiny_model: Path) -> None:
    bench.result = sweep_report(limit_share=1.2)
    assert "batch 8 is above its limit" in bench.run("sweep", str(tiny_model), *SHORT).stdout


def test_calibrate_keeps_what_it_found(bench: Bench, tiny_model: Path) -> None:
    bench.result = {
        "cost": asdict(SMOLLM2_ON_SMALL_CPU),
        "about": {
            "model": str(tiny_model),
            "model_hash": "f" * 64,
            "dtype": "bfloat16",
            "quantization": "none",
            "tensor_parallel": 1,
            "device": "cpu",
            "machine": "this one",
            "read_bytes_per_s": 30e9,
            "flop_per_s": 4e11,
            "measured_on": {"load_averages": [9.0, 1.0, 1.0], "cores": 2},
        },
        "samples": [
            {
                "prefill_tokens": 512,
                "prefill_pairs": 131328,
                "decode_rows": 0,
                "context_tokens": 0,
                "seconds": 0.35,
                "residual": -0.031,
            }
        ],
        "checks": [
            {
                "kind": "decode",
                "batch": 8,
                "measured_tokens_per_s": 700.0,
                "predicted_tokens_per_s": 735.0,
                "error": 0.05,
            }
        ],
        "pool": {"free_before_bytes": 1 << 30, "num_blocks": 1000, "block_size": 16, "block_bytes": 4096},
    }
    done = bench.run("calibrate", str(tiny_model))
    assert done.exit_code == 0, done.stderr
    assert isinstance(bench.orders[0], CalibrateOrder)
    assert "-3.1 %" in done.stdout and "+5.0 %" in done.stdout and "KV blocks" in done.stdout
    assert "4.5 programs wanted each core" in done.stdout
    assert find_calibration("f" * 64, "bfloat16", "none").cost == SMOLLM2_ON_SMALL_CPU


def test_kv_cache(bench: Bench, tiny_model: Path) -> None:
    bench.result = {
        "kind": "kv-cache",
        "rows": [
            {
                "new_tokens": 64,
                "with_cache_s": 0.5,
                "without_cache_s": 5.0,
                "times_slower": 10.0,
                "passes_with": 127,
                "passes_without": 6112,
            }
        ],
        "config": {"model": "m"},
        "load": {"prompt_tokens": 64, "growth_with": 1.01, "growth_without": 1.9},
        "samples": {},
    }
    done = bench.run("kv-cache", str(tiny_model), "--output", "64")
    assert isinstance(bench.orders[0], KvCacheOrder) and bench.orders[0].new_tokens == 64
    assert "6,112" in done.stdout and "power 1.01 of the tokens with the cache, 1.9 without" in done.stdout


def test_failures_are_told(bench: Bench, tiny_model: Path) -> None:
    bench.result = MeasuringFailed("no memory left")
    done = bench.run("sweep", str(tiny_model), *SHORT)
    assert (done.exit_code, "no memory left" in done.stderr) == (1, True)
    for batches in ("1,x", "0,1", "", "4097", "9" * 5000):
        done = bench.run("sweep", str(tiny_model), "--batches", batches)
        assert (done.exit_code, f"--batches '{batches[:100]}': give numbers from 1" in done.stderr) == (
            2,
            True,
        )
    bench.outcomes = ServerUnusable("nobody there")
    assert "nobody there" in bench.run("serve", "--requests", "2").stderr
    assert "--rate '0'" in bench.run("serve", "--rate", "0").stderr
    assert "a trace is a .jsonl" in bench.run("replay", __file__).stderr


OUTCOME = Outcome(
    number=0,
    due_s=0.0,
    sent_s=0.001,
    token_s=(0.2, 0.3, 0.4),
    end_s=0.4,
    prompt_tokens=100,
    output_tokens=3,
    cached_tokens=50,
)


def test_serve_at_several_rates(bench: Bench, tmp_path: Path) -> None:
    bench.outcomes = [OUTCOME, replace(OUTCOME, number=1, error="status 503: full", token_s=())]
    out = tmp_path / "serve.json"
    done = bench.run(
        *("serve", "--url", "http://127.0.0.1:1", "--rate", "1,2.5", "--requests", "2", "--prompt", "40"),
        *("--ttft", "250", "--tpot", "90", "-o", str(out)),
    )
    assert done.exit_code == 0, done.stderr
    assert [server.url for server in bench.servers] == ["http://127.0.0.1:1"] * 2
    assert [due.number for due in bench.sent] == [0, 1] and len(bench.sent[0].prompt) == 40
    assert "2 requests failed; the first: status 503: full" in done.stderr
    assert "good: answered, within TTFT 250 ms and TPOT 90 ms" in done.stdout
    report = json.loads(out.read_text())
    assert [row["load"] for row in report["rows"]] == ["1/s", "2.5/s"]
    assert report["rows"][0]["good_share"] == 0.0  # TPOT is 100 ms
    assert report["samples"]["1/s"][0]["token_s"] == [0.2, 0.3, 0.4]
    assert report["config"]["name"] == "m" and report["config"]["max_model_len"] == 512
    assert report["load"]["limits"] == {"ttft_ms": 250.0, "tpot_ms": 90.0}


def test_replay_scales_and_keeps_prefixes(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]},
        {"timestamp": 500, "input_length": 1000, "output_length": 32, "hash_ids": [0, 2]},
        {"timestamp": 900, "input_length": 1000, "output_length": 32, "hash_ids": [0, 2]},
    ]
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    bench.outcomes = [OUTCOME]
    done = bench.run(
        *("replay", str(trace), "--length-divisor", "16", "--rate-divisor", "4", "--requests", "2", "--json")
    )
    assert done.exit_code == 0, done.stderr
    first, second = bench.sent
    assert (len(first.prompt), len(second.prompt), second.due_s) == (64, 62, 2.0)
    assert first.prompt[:32] == second.prompt[:32] and first.prompt[32] != second.prompt[32]
    load = json.loads(done.stdout)["load"]
    assert (load["requests"], load["mean_prompt_tokens"], load["mean_new_tokens"]) == (2, 63.0, 3.0)


def test_nothing_answered_is_a_failure(bench: Bench) -> None:
    bench.outcomes = [replace(OUTCOME, error="gone", token_s=())]
    assert bench.run("serve", "--requests", "1").exit_code == 1
