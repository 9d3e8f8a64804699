"""The measuring programs on a tiny model, from the order to the result, and how a child is spoken to."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from cluster.bench import child
from cluster.bench.calibrate import calibrate
from cluster.bench.chart import main
from cluster.bench.child import MeasuringFailed, measure
from cluster.bench.orders import CalibrateOrder, EngineSettings, KvCacheOrder, QuantizeOrder, SweepOrder
from cluster.bench.subject import Prompts, open_engine
from cluster.figures.step_cost import StepCost, StepShape

MIB = 1 << 20


def settings(model: Path, **other: int) -> EngineSettings:
    return EngineSettings(model=str(model), threads=1, max_bytes=8 * MIB, **other)


def test_every_step_is_timed_with_what_it_computed(tiny_model: Path) -> None:
    with open_engine(settings(tiny_model, max_step_tokens=16)) as engine:
        vocab = engine.facts.limits.vocab_size
        run = engine.run(Prompts(vocab).take(2, 20), 3)
    assert [step.shape for step in run.steps] == [
        StepShape(prefill_tokens=16, prefill_pairs=136),
        # The rest of the first prompt, and a beginning of the second.
        StepShape(prefill_tokens=16, prefill_pairs=17 + 18 + 19 + 20 + 78),
        StepShape(prefill_tokens=8, prefill_pairs=sum(range(13, 21)), decode_rows=1, context_tokens=21),
        StepShape(decode_rows=2, context_tokens=22 + 21),
        StepShape(decode_rows=1, context_tokens=22),
    ]
    assert run.first_s == sorted(run.first_s) and 0 < run.first_s[0] < run.last_s[0] <= run.seconds
    assert math.isclose(sum(step.seconds for step in run.steps), run.seconds, rel_tol=0.2)
    assert max(step.active_blocks for step in run.steps) == 4


def test_calibrating(tiny_model: Path) -> None:
    said: list[str] = []
    order = CalibrateOrder(engine=settings(tiny_model), seconds=1.0)
    result = measure(order, said.append, timeout_s=120.0)
    cost = StepCost.of(result["cost"])
    assert cost.seconds(StepShape(decode_rows=1, context_tokens=10)) > 0
    assert result["about"]["model_hash"] and result["about"]["dtype"] == "bfloat16"
    about = result["about"]
    assert min(about["read_bytes_per_s"], about["flop_per_s"], about["float32_flop_per_s"]) > 1e8
    assert {(row["kind"], row["batch"]) for row in result["checks"]} == {
        (kind, batch) for kind in ("decode", "prefill") for batch in (1, 8, 32)
    }
    assert len(result["samples"]) > 15
    assert result["pool"]["num_blocks"] > 0 and result["pool"]["free_before_bytes"] > 0
    assert said[0] == f"loading {tiny_model}" and "pass 1" in said


def test_a_sweep_and_its_report(tiny_model: Path) -> None:
    order = SweepOrder(engine=settings(tiny_model), batches=(1, 4), prompt_tokens=20, new_tokens=6)
    content = measure(order, lambda text: None, timeout_s=120.0)
    assert [row["batch"] for row in content["rows"]] == [1, 4]
    assert all(row["throughput_tokens_per_s"] > 0 and row["kv_use"] > 0 for row in content["rows"])
    assert len(content["samples"]["4"][0]["first_s"]) == 4
    assert sum(step[1] for step in content["samples"]["4"][0]["steps"]) == 4 * 5
    assert content["machine"]["commit"] and content["load"]["batches"] == [1, 4]
    assert content["kind"] == "sweep"


def test_with_and_without_a_cache(tiny_model: Path) -> None:
    order = KvCacheOrder(engine=settings(tiny_model), prompt_tokens=20, new_tokens=16)
    content = measure(order, lambda text: None, timeout_s=120.0)
    assert [row["new_tokens"] for row in content["rows"]] == [8, 16]
    assert content["rows"][-1]["passes_with"] == 20 + 15
    assert content["rows"][-1]["passes_without"] == sum(range(20, 36))
    assert len(content["samples"]["without_cache_s"]) == 16 == len(content["samples"]["with_cache_s"])


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    order = SweepOrder(engine=settings(tmp_path / "nothing"))
    with pytest.raises(MeasuringFailed, match="no such model folder"):
        measure(order, lambda text: None, timeout_s=60.0)


def test_a_child_that_takes_too_long_is_ended(tiny_model: Path) -> None:
    with pytest.raises(MeasuringFailed, match=r"not done within 0\.5 s"):
        measure(CalibrateOrder(engine=settings(tiny_model)), lambda text: None, timeout_s=0.5)


def test_a_child_that_is_killed_is_not_said_to_be_late(tiny_model: Path) -> None:
    def children() -> set[int]:
        """Of this thread; those that other tests have left are among them."""
        listed = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
        return set(map(int, listed.read_text().split()))

    def kill(said: str) -> None:
        (child,) = children() - others
        os.kill(child, signal.SIGKILL)

    others = children()
    with pytest.raises(MeasuringFailed, match="was ended by SIGKILL, as for want of memory"):
        measure(CalibrateOrder(engine=settings(tiny_model)), kill, timeout_s=60.0)


def test_shapes_that_the_pool_does_not_hold_are_left_out(tiny_model: Path) -> None:
    """256 blocks of 16 tokens do not hold 32 sequences of 128 tokens with a block to spare for each."""
    small = EngineSettings(model=str(tiny_model), threads=1, max_bytes=MIB)
    result = calibrate(CalibrateOrder(engine=small, seconds=1.0), lambda said: None)
    assert result["pool"]["num_blocks"] == 256
    assert max(sample["decode_rows"] for sample in result["samples"]) == 16
    assert {row["batch"] for row in result["checks"]} == {1, 8}


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "batch": batch,
            "decode_limit_tokens_per_s": 100.0 * batch,
            "decode_tokens_per_s": 80.0 * batch,
            "throughput_tokens_per_s": 60.0 * batch,
            "latency_s": 1.0 * batch,
            "ttft_ms": 100.0,
            "tpot_ms": 10.0,
            "is_knee": batch == 8,
        }
        for batch in (1, 8)
    ]
    reports = [
        {
            "kind": "sweep",
            "rows": rows,
            "config": {"model": "/models/tiny"},
            "load": {"prompt_tokens": 20, "new_tokens": 6},
        },
        {
            "kind": "kv-cache",
            "rows": [],
            "config": {"model": "/models/tiny"},
            "load": {"prompt_tokens": 20},
            "samples": {"with_cache_s": [1.0, 2.0], "without_cache_s": [1.0, 4.0]},
        },
    ]
    for report in reports:
        file = tmp_path / f"{report['kind']}.png"
        monkeypatch.setattr(sys, "argv", ["chart", str(file)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(report)))
        assert main() == 0
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_program_that_is_ended_leaves_nothing_half_made(tiny_model: Path, tmp_path: Path) -> None:
    program = """
import sys, time
from cluster.bench import program
from workers.quantizing import folder
def write(checkpoint, jobs, temporary, report):
    report(temporary.name)
    time.sleep(60)
folder._write_weights = write
sys.exit(program.main())
"""
    order = QuantizeOrder(model=str(tiny_model), form="int8", out=str(tmp_path / "out"), has_report=False)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.close()
        said = json.loads(process.stdout.readline())
        assert [found.name for found in tmp_path.iterdir()] == [said["progress"]]
        process.send_signal(signal.SIGINT)  # of the terminal; the starter's word follows
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_late_may_remove_what_is_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_made = tmp_path / "half made"
    program = f"""
import pathlib, signal, sys, time
folder = pathlib.Path({str(half_made)!r})
signal.signal(signal.SIGTERM, lambda *_: (folder.rmdir(), sys.exit(143)))
folder.mkdir()
print('{{"progress": "made"}}', flush=True)
time.sleep(60)
"""
    monkeypatch.setattr(child, "module_command", lambda module: [sys.executable, "-c", program])
    said: list[str] = []
    with pytest.raises(MeasuringFailed, match="not done within 3 s"):
        measure(SweepOrder(engine=settings(tmp_path)), said.append, timeout_s=3.0)
    assert (said, half_made.exists()) == (["made"], False)
