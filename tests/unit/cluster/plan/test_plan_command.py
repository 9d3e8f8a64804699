"""`tandem plan` from models and devices to tables, JSON, and files that `tandem validate` accepts."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cluster.config.parse import EMBEDDED_MODEL
from cluster.deployment.load import load_deployment
from cluster.figures.machine import usable_cores
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU
from cluster.plan.arithmetic import linear_flop
from cluster.plan.calibration import find_calibration, keep_calibration
from cluster.plan.devices import DEVICES
from cluster.plan.memory import Shape
from cluster.plan.models import UnknownModel, find_model
from cluster.plan.plan import find_speed, load_of, split_cost
from tests.unit.cluster.conftest import World

TARGETS = ("--ttft", "2000", "--tpot", "50")


def test_the_well_known_example(world: World) -> None:
    done = world.run("plan", "llama-2-7b", "--device", "a100-80g", "--context", "2048")
    assert done.exit_code == 0, done.stderr
    for text in (
        "llama-2-7b: 6.74 B parameters, L 32, H 4096, A 32, K 32, D 128, F 11008, V 32000",
        "13,476,831,232  12.55  6,738,415,616 parameters x 2 B",
        "= 524,288 B a token, 1,024 MiB for 2,048 tokens",
        "66 requests of 2,048 tokens fit at once",
        "  2,048   27.6    26.5        1.1",
        "= 66 requests. The plan takes exact weights and subtracts reserve, activations and buffers.",
        "2 TB/s / 14 GB = 143 tokens/s at batch 1.",
        "2.2 TFLOP for 2,048 tokens counts one H x H product a layer: 12 times too low.",
        "from batch 156 with short contexts",
    ):
        assert text in done.stdout, text
    other = world.run("plan", "mistral-7b", "--device", "a100-80g").stdout
    assert "= 131,072 B a token, 256 MiB for 2,048 tokens" in other
    assert "= 267 requests." in other
    assert "261 requests of 2,048 tokens fit at once" in other


def test_json_has_it_all(world: World) -> None:
    done = world.run("plan", "llama-2-7b", "--device", "h100", "--tensor-parallel", "2", "--json")
    facts = json.loads(done.stdout)
    assert facts["tensor_parallel"] == 2
    assert [row["tensor_parallel"] for row in facts["ranks"]] == list(range(1, 9))
    assert facts["device"]["source"] == DEVICES["h100"].source
    assert facts["memory"]["requests"] == facts["ranks"][1]["requests"]
    assert facts["turn"]["at_context"] is None
    assert facts["proposal"] is None


def test_the_smallest_number_of_ranks_that_fits_is_taken(world: World) -> None:
    done = world.run("plan", "llama-2-7b", "--device", "l4", "--dtype", "float32", "--json")
    facts = json.loads(done.stdout)
    assert facts["ranks"][0] == {
        "tensor_parallel": 1,
        "weight_bytes": 0,
        "pool_tokens": 0,
        "requests": 0,
        "is_capped": False,
    }
    assert facts["tensor_parallel"] == 2
    assert facts["memory"]["kv_bytes_per_token"] == 1_048_576


def test_int8_keys_and_values_are_planned_with_their_scales(world: World) -> None:
    asked = ("plan", "llama-2-7b", "--device", "a100-80g", "--kv-dtype")
    plain, int8 = (json.loads(world.run(*asked, form, "--json").stdout) for form in ("auto", "int8"))
    assert [facts["model"]["kv_dtype"] for facts in (plain, int8)] == ["bfloat16", "int8"]
    assert int8["memory"]["kv_bytes_per_token"] == 2 * 32 * 32 * (128 + 2)
    assert int8["memory"]["pool_tokens"] > 1.9 * plain["memory"]["pool_tokens"]
    refused = world.run(*asked, "int4")
    assert refused.exit_code == 2 and "--kv-dtype 'int4': it is one of auto, int8" in refused.output


def test_models_come_from_folders_files_and_names(tiny_model: Path) -> None:
    folder, file = find_model(str(tiny_model)), find_model(str(tiny_model / "config.json"))
    assert folder.spec == file.spec
    assert folder.path == str(tiny_model) and file.path is None
    assert folder.model_hash("none") is not None and file.model_hash("none") is None
    assert find_model("SmolLM2-135M").path == EMBEDDED_MODEL
    with pytest.raises(UnknownModel, match="llama-2-7b, mistral-7b, mixtral-8x7b, smollm2-135m"):
        find_model("nosuch")
    with pytest.raises(UnknownModel, match="no model '~nobody-of-that-name/folder'"):
        find_model("~nobody-of-that-name/folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "nosuch"), "no model 'nosuch'"),
        (("plan", "llama-2-7b", "--device", "abacus"), "no device 'abacus': there are a100-40g, a100-80g"),
        (("plan", "llama-2-7b", "--context", "5000"), "llama-2-7b allows at most 4,096"),
        (("plan", "llama-2-7b", "--dtype", "float16"), "--dtype 'float16': it is one of bfloat16, float32"),
        (("plan", "llama-2-7b", "--rate", "1"), "a proposal needs --ttft, --tpot, and --rate or --trace"),
        (("plan", ""), "the model is an empty text"),
        (("plan", "llama-2-7b", "--prompt", "9"), "--prompt and --output are for --rate"),
        (("plan", "smollm2-135m", "--tensor-parallel", "4"), "sizes that work: 1, 2, 3, 9"),
        (
            ("plan", "llama-2-7b", "--device", "l4", "--dtype", "float32", "--tensor-parallel", "1"),
            "use more ranks",
        ),
        (("plan", "llama-2-7b", "--device", "l4", "--rate", "1", "--ttft", "1", "--tpot", "1"), "TTFT: "),
    ],
)
def test_refusals(world: World, arguments: tuple[str, ...], message: str) -> None:
    done = world.run(*arguments)
    assert done.exit_code == (1 if message in ("use more ranks", "TTFT: ") else 2)
    assert message in done.stderr, done.stderr


def test_a_proposal_becomes_a_file_that_validates(world: World, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    done = world.run(
        *("plan", "llama-2-7b", "--device", "a100-80g", *TARGETS, "--rate", "20", "--prompt", "1024"),
        *("--output", "256", "-o", str(out), "--model-path", "/models/llama-2-7b"),
    )
    assert done.exit_code == 0, done.stderr
    assert "For 20 requests a second, 1,024 prompt and 256 new tokens" in done.stdout
    deployment = load_deployment(out)
    assert deployment.config.model.path == "/models/llama-2-7b"
    assert deployment.config.model.max_model_len == 2048
    facts = json.loads(
        world.run(
            *("plan", "llama-2-7b", "--device", "a100-80g", *TARGETS, "--rate", "20", "--prompt", "1024"),
            *("--output", "256", "--json"),
        ).stdout
    )["proposal"]
    for pool in facts["pools"]:
        made = deployment.config.pools.by_name()[pool["role"]]
        assert made.tensor_parallel == pool["tensor_parallel"]
        assert made.parallel.device == "cuda"
        assert deployment.num_replicas[pool["role"]] == pool["groups"]
    assert facts["devices"] == sum(pool["groups"] * pool["tensor_parallel"] for pool in facts["pools"])


def test_pools_are_as_large_as_the_proposal_reckons_them(world: World, tmp_path: Path) -> None:
    """Though the model fits into fewer devices, with less left beside it."""
    fractions = []
    for name, ranks in (("chosen", ()), ("given", ("--tensor-parallel", "2"))):
        out = tmp_path / f"{name}.yaml"
        done = world.run(
            *("plan", "llama-2-7b", "--device", "a100-80g", "--ttft", "100", "--tpot", "9", "--rate", "1"),
            *("--prompt", "1024", "--output", "256", "-o", str(out), "--model-path", "/m", *ranks),
        )
        assert done.exit_code == 0, done.stderr
        for pool in load_deployment(out).config.pools.by_name().values():
            assert pool.tensor_parallel == 2
            fractions.append(pool.cache.memory_fraction)
    assert len(set(fractions)) == 1


def test_this_machine_writes_what_validate_accepts_with_its_model(
    world: World, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.yaml"
    done = world.run(
        *("plan", str(tiny_model), "--context", "64", "--ttft", "900", "--tpot", "50", "--rate", "0.5"),
        *("--prompt", "40", "--output", "8", "-o", str(out)),
    )
    assert done.exit_code == 0, done.stderr
    assert "run `tandem bench calibrate MODEL` first" in done.stdout
    checked = world.run("validate", str(out))
    assert checked.exit_code == 0, checked.stderr


def test_many_machines_of_this_kind_get_a_group_each(world: World, tiny_model: Path, tmp_path: Path) -> None:
    keep_calibration(calibration(str(find_model(str(tiny_model)).model_hash("none"))))
    out = tmp_path / "plan.yaml"
    done = world.run(
        *("plan", str(tiny_model), "--context", "128", "--ttft", "2000", "--tpot", "50", "--rate", "40"),
        *("--prompt", "100", "--output", "20", "-o", str(out)),
    )
    assert done.exit_code == 0, done.stderr
    config = load_deployment(out).config
    assert config.network.interface == "node"
    assert {pool.cpus_per_rank for pool in config.pools.by_name().values()} == {usable_cores()}


def test_ranks_on_cpus_share_a_machine_and_count_as_one(
    world: World, tiny_model: Path, tmp_path: Path
) -> None:
    keep_calibration(calibration(str(find_model(str(tiny_model)).model_hash("none"))))
    out = tmp_path / "plan.yaml"
    arguments = (
        *("plan", str(tiny_model), "--context", "128", "--ttft", "2000", "--tpot", "50", "--rate", "40"),
        *("--prompt", "100", "--output", "20", "--tensor-parallel", "2"),
    )
    facts = json.loads(world.run(*arguments, "--json", "-o", str(out)).stdout)["proposal"]
    assert facts["devices"] == sum(pool["groups"] for pool in facts["pools"]) > 1
    for pool in load_deployment(out).config.pools.by_name().values():
        assert (pool.tensor_parallel, pool.placement) == (2, "STRICT_PACK")
        assert pool.cpus_per_rank * 2 == usable_cores()


def test_a_trace_is_a_demand(world: World, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:{i:02d},400,40" for i in range(0, 60, 2)]
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    arguments = ("plan", "llama-2-7b", "--device", "a100-80g", *TARGETS, "--trace", str(trace), "--json")
    demand = json.loads(world.run(*arguments).stdout)["proposal"]["demand"]
    assert (demand["mean_prompt"], demand["mean_output"]) == (400, 40)
    assert demand["rate"] == pytest.approx(30 / 58)


def test_requests_that_would_be_refused_are_not_planned_for(world: World, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "new" / "plan.yaml"
    rows = [f"2023-11-16 18:17:{i:02d},{3000 if i % 4 else 400},40" for i in range(0, 60, 1)]
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    arguments = ("plan", "llama-2-7b", "--device", "a100-80g", *TARGETS, "--trace", str(trace))
    written = ("-o", str(out), "--model-path", "/models/llama")
    refused = world.run(*arguments, "--context", "2048", *written)
    assert refused.exit_code == 1 and not out.exists()
    assert "75.0% of the requests are longer than --context 2,048" in refused.stderr
    assert "--context 3040 holds all of them" in refused.stderr
    rows = [f"2023-11-16 18:17:{i:02d},{400 if i % 4 else 3000},40" for i in range(0, 60, 1)]
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    done = world.run(*arguments, "--context", "2048", *written)
    assert done.exit_code == 0, done.stderr
    said = "25.0% of the requests are longer than 2,048 tokens: they are refused, and not counted here"
    assert said in done.stdout and f"# {said}." in out.read_text()
    demand = json.loads(world.run(*arguments, "--json").stdout)["proposal"]["demand"]
    assert (demand["mean_prompt"], demand["refused_share"]) == (400, 0.25)
    assert demand["rate"] == pytest.approx(60 / 59 * 0.75)


def test_float32_has_a_ceiling_of_its_own() -> None:
    device, speed = find_speed(find_model("llama-2-7b"), "a100-80g", Shape(dtype="float32"), efficiency=1.0)
    assert (device.flop_per_s, speed.roofs.flop_per_s) == (52e12, 52e12)
    assert device.source.endswith("float32 as three products in TF32, 52.0 TFLOPS")
    assert find_speed(find_model("llama-2-7b"), "h100", Shape(), efficiency=1.0)[0].flop_per_s == 989.4e12


def test_this_machine_has_one_too(world: World, tiny_model: Path) -> None:
    """Of whatever dtype the model was that it was calibrated with."""
    large, floats = find_model("llama-2-7b"), Shape(dtype="float32")
    assert find_speed(large, "this", floats, efficiency=1.0)[1].roofs.flop_per_s == 210e9
    known = calibration(str(find_model(str(tiny_model)).model_hash("none")))
    for damaged in ({}, *({"float32_flop_per_s": value} for value in (10**400, math.inf, True, 0, "1"))):
        file = keep_calibration({**known, "about": known["about"] | damaged})
        refused = world.run("plan", "smollm2-135m", "--dtype", "float32")
        assert refused.exit_code == 1
        assert refused.stderr == (
            f"error: {file}: the measured ceilings of float32 are missing: calibrate again\n"
        )
    keep_calibration({**known, "about": known["about"] | {"float32_flop_per_s": 4e11}})
    for shape, flop_per_s in ((floats, 4e11), (Shape(), 1e12)):
        device, speed = find_speed(large, "this", shape, efficiency=1.0)
        assert (device.flop_per_s, speed.roofs.flop_per_s) == (flop_per_s, flop_per_s)
        assert speed.cost.token_s == pytest.approx(linear_flop(large.spec, 1) / flop_per_s)


def test_what_caps_the_pool_and_the_batch_is_said(world: World) -> None:
    arguments = ("plan", "smollm2-135m", "--device", "h100", "--max-running", "64", "--json")
    facts = json.loads(world.run(*arguments).stdout)
    assert facts["memory"]["requests"] == 256 and "engine's rule" in facts["memory"]["cap"]
    assert [(row["batch"], row["fits"], row["runs"]) for row in facts["decode"]][-2:] == [
        (128, True, False),
        (256, True, False),
    ]
    said = world.run(*arguments[:-1]).stdout
    for text in ("the pool is capped by", "beyond max_running", "at most 64 of them run at the same time"):
        assert text in said
    large = json.loads(world.run("plan", "llama-2-7b", "--device", "a100-80g", "--json").stdout)
    assert large["memory"]["cap"] == ""


@pytest.mark.parametrize(
    "option",
    [
        ("--prompt", "9" * 401),
        ("--batch", "9" * 401),
        ("--length-divisor", "1e-305"),
        ("--rate-divisor", "1e305"),
        ("--rate", "1e308"),
    ],
)
def test_numbers_without_meaning_are_refused(world: World, option: tuple[str, str]) -> None:
    done = world.run("plan", "llama-2-7b", *option)
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit)
    assert f"Invalid value for '{option[0]}'" in done.stderr


def test_files_need_to_know_the_folder(world: World, tmp_path: Path) -> None:
    done = world.run(
        *("plan", "llama-2-7b", "--device", "h100", *TARGETS, "--rate", "1", "-o", str(tmp_path / "a.yaml"))
    )
    assert done.exit_code == 2 and "--model-path" in done.stderr


def test_a_calibration_is_found_again_for_its_model_only(world: World, tiny_model: Path) -> None:
    model_hash = find_model(str(tiny_model)).model_hash("none")
    assert model_hash is not None
    file = keep_calibration(calibration(model_hash))
    assert file.is_relative_to(world.folder)
    found = find_calibration(model_hash, "bfloat16", "none")
    assert found.is_measured and found.cost == SMOLLM2_ON_SMALL_CPU
    assert (found.roofs.read_bytes_per_s, found.roofs.flop_per_s) == (1e9, 1e12)
    assert not find_calibration(model_hash, "float32", "none").is_measured
    for dtype in ("bfloat16", "float32"):  # of the same quantized weights
        known = calibration(model_hash)
        facts = {"dtype": dtype, "quantization": "int8", "float32_flop_per_s": 4e11}
        keep_calibration({**known, "about": known["about"] | facts})
    flops = [
        find_calibration(model_hash, dtype, "int8").roofs.flop_per_s for dtype in ("bfloat16", "float32")
    ]
    assert flops == [1e12, 4e11]
    assert find_calibration(model_hash, "bfloat16", "int8").source.endswith(
        f"-bfloat16-int8-{model_hash[:16]}.json"
    )
    assert not find_calibration(None, "bfloat16", "none").is_measured
    assert (
        "measured on this machine (this one)" in world.run("plan", str(tiny_model), "--context", "128").stdout
    )
    file.write_text("{")
    refused = world.run("plan", str(tiny_model), "--context", "128")
    assert refused.exit_code == 1 and "not readable as JSON" in refused.stderr


def test_ranks_share_the_work_and_pay_for_their_traffic() -> None:
    model, shape = find_model("llama-2-7b"), Shape(tensor_parallel=4)
    device, speed = find_speed(model, "a100-80g", shape, efficiency=1.0)
    one, four = speed.cost, split_cost(model, device, speed, shape)
    assert four.weights_s == one.weights_s / 4 and four.pair_s == one.pair_s / 4
    assert four.overhead_s == pytest.approx(64 * 10e-6)
    # 64 all-reduces of 4096 values of 2 bytes, 2 (n - 1) / n of them over 300 GB/s.
    assert four.token_s == pytest.approx(one.token_s / 4 + 64 * 1.5 * 8192 / 300e9)
    here, measured = find_speed(model, "this", shape, efficiency=1.0)
    assert split_cost(model, here, measured, shape) == measured.cost


def test_steps_of_another_model_are_not_taken_for_this_one(world: World) -> None:
    small, shape = find_model("smollm2-135m"), Shape()
    assert find_speed(small, "this", shape, efficiency=0.5)[1].cost == SMOLLM2_ON_SMALL_CPU
    large = find_model("llama-2-7b")
    device, speed = find_speed(large, "this", shape, efficiency=0.5)
    assert speed.efficiency == 0.5
    assert speed.cost.weights_s == pytest.approx(load_of(large, shape).weight_bytes / 17e9)
    keep_calibration(calibration("0" * 64, gpu_memory_bytes=0))
    device, speed = find_speed(large, "this", shape, efficiency=1.0)
    assert (device.read_bytes_per_s, device.is_gpu) == (1e9, False)
    assert speed.source.startswith("ceilings measured on this machine")


def test_a_gpu_that_was_measured_is_planned_as_one(world: World, tiny_model: Path) -> None:
    model = find_model(str(tiny_model))
    keep_calibration(calibration(str(model.model_hash("none")), gpu_memory_bytes=8 << 30))
    device, speed = find_speed(model, "this", Shape(), efficiency=1.0)
    assert device.is_gpu and device.memory_bytes == 8 << 30
    assert speed.cost == SMOLLM2_ON_SMALL_CPU


def calibration(model_hash: str, *, gpu_memory_bytes: int = 0) -> dict[str, Any]:
    return {
        "cost": asdict(SMOLLM2_ON_SMALL_CPU),
        "about": {
            "model_hash": model_hash,
            "dtype": "bfloat16",
            "quantization": "none",
            "tensor_parallel": 1,
            "machine": "this one",
            "gpu_memory_bytes": gpu_memory_bytes,
            "read_bytes_per_s": 1e9,
            "flop_per_s": 1e12,
        },
        "samples": [],
        "checks": [],
        "pool": {},
    }


def test_what_several_ranks_take_is_kept_apart(world: World) -> None:
    alone, together = calibration("f" * 64), calibration("f" * 64)
    together["about"]["tensor_parallel"] = 2
    together["cost"]["token_s"] *= 2
    files = [keep_calibration(result) for result in (alone, together)]
    assert len(set(files)) == 2 and "2-ranks" in files[1].name
    assert find_calibration("f" * 64, "bfloat16", "none").cost == SMOLLM2_ON_SMALL_CPU


def test_proposals_fill_machines_of_eight(world: World) -> None:
    arguments = ("plan", "llama-2-7b", "--device", "a100-80g", *TARGETS, "--rate", "20", "--json")
    looked_at = json.loads(world.run(*arguments).stdout)["proposal"]["looked_at"]
    assert [line.split(",")[1].split()[0] for line in looked_at] == ["1", "1", "2", "2", "4", "4", "8", "8"]
