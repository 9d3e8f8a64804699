"""`tandem plan` of odd sizes, and the files that it reads and writes."""

import json
from pathlib import Path

from cluster.deployment.load import load_deployment
from tests.unit.cluster.conftest import World
from tests.unit.cluster.plan.test_plan_command import TARGETS

LENIENT = ("--ttft", "60000", "--tpot", "5000")


def test_a_model_that_only_fits_three_devices_is_planned_for_three(world: World, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 4608, "num_hidden_layers": 110,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 12288,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    file.write_text(json.dumps(config))
    done = world.run("plan", str(file), "--device", "l4", *TARGETS, "--rate", "0.01", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 1 and facts["message"].startswith("one pool, 3 ranks a group: "), facts
    done = world.run("plan", str(file), "--device", "l4", *LENIENT, "--rate", "0.01", "--json")
    assert json.loads(done.stdout)["proposal"]["pools"][0]["tensor_parallel"] == 3


def test_one_request_at_a_time_is_a_plan(world: World) -> None:
    done = world.run(
        *(
            "plan",
            "llama-2-7b",
            "--device",
            "h100",
            *TARGETS,
            "--rate",
            "0.01",
            "--max-running",
            "1",
            "--json",
        ),
    )
    assert done.exit_code == 0, done.stdout
    assert json.loads(done.stdout)["proposal"]["pools"][0]["groups"] == 1


def test_a_file_s_name_stays_within_its_comment(world: World, tmp_path: Path) -> None:
    trace, out = tmp_path / "a\nproxy_location: Disabled\x1b.csv", tmp_path / "plan.yaml"
    rows = [f"2023-11-16 18:17:{i:02d},400,40" for i in range(0, 60, 2)]
    trace.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    done = world.run(
        *("plan", "llama-2-7b", "--device", "h100", *TARGETS, "--trace", str(trace), "-o", str(out)),
        *("--model-path", "/models/llama"),
    )
    assert done.exit_code == 0, done.output
    assert "(a?proxy_location: Disabled?.csv: 30 requests, its busiest minute):" in out.read_text()
    assert load_deployment(out).tree["proxy_location"] == "HeadOnly"


def test_a_file_that_is_there_is_not_written_over(world: World, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    out.write_text("mine")
    arguments = ("plan", "llama-2-7b", "--device", "h100", *TARGETS, "--rate", "1", "-o", str(out))
    arguments = (*arguments, "--model-path", "/models/llama")
    done = world.run(*arguments)
    assert (done.exit_code, out.read_text()) == (1, "mine")
    assert f"{out} is there already: name another file, or write over it with --force" in done.stderr
    assert world.run(*arguments, "--force").exit_code == 0
    assert load_deployment(out).config.model.path == "/models/llama"
