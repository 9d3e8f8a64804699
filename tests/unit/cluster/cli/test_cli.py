"""`tandem model`, `validate` and `version`, and how the terminal is treated."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cli.terminal import Phases, Terminal
from tests.unit.cluster.conftest import World


def test_model_path_prints_the_folder_and_nothing_else(world: World, tiny_model: Path) -> None:
    done = world.run("model", "path")
    assert (done.exit_code, done.stdout) == (0, f"{world.folder}\n")
    assert done.stderr.endswith("found SmolLM2-135M-Instruct\n")
    assert world.run("model", "path", str(tiny_model)).stdout == f"{tiny_model}\n"
    assert json.loads(world.run("model", "path", "--json").stdout)["folder"] == str(world.folder)


def test_model_fetch_ends_with_the_folder(world: World) -> None:
    done = world.run("model", "fetch")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, str(world.folder))
    done = world.run("model", "fetch", "--json")
    assert json.loads(done.stdout) == {"name": "SmolLM2-135M-Instruct", "folder": str(world.folder)}


def test_a_model_that_is_not_there(world: World) -> None:
    done = world.run("model", "path", "nosuch")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no model 'nosuch'" in done.stderr
    assert "does not exist; give a folder in Hugging Face layout, or SmolLM2-135M-Instruct" in done.stderr


def test_model_inspect_tells_sizes_and_splits(world: World, tiny_model: Path) -> None:
    facts = json.loads(world.run("model", "inspect", str(tiny_model), "--json").stdout)
    assert (facts["model_type"], facts["layers"], facts["heads"], facts["kv_heads"]) == ("llama", 2, 4, 2)
    assert facts["tensor_parallel_sizes"] == [1, 2, 4]
    assert (facts["stored_dtypes"], facts["tied_embeddings"]) == (["BF16"], True)
    assert facts["parameters"] * 2 < facts["weight_bytes"]
    text = world.run("model", "inspect", str(tiny_model)).stdout
    assert "tensor parallel sizes" in text
    assert "1, 2, 4" in text


def test_pickle_only_is_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    for arguments in (
        ("model", "inspect", str(folder)),
        ("validate", world.file(), "--set", f"model.path={folder}"),
        ("serve", world.file(), "--set", f"model.path={folder}"),
    ):
        done = world.run(*arguments)
        assert done.exit_code == 2, arguments
        assert "pickle checkpoints are not loaded" in done.stderr
    assert "start" not in world.launcher.calls


def test_validate_says_what_would_run(world: World, tiny_model: Path) -> None:
    file = world.file()
    done = world.run("validate", file, "--set", f"model.path={tiny_model}")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].endswith("deployment.yaml: valid")
    assert lines[1] == f"  application  tandem at {world.server.url}"
    assert "context 128" in lines[2]
    assert lines[3] == "  pool         unified: 2 groups of 1 rank"
    done = world.run("validate", file, "--set", f"model.path={tiny_model}", "--json")
    assert json.loads(done.stdout) == {
        "valid": True,
        "file": file,
        "kind": "deployment",
        "application": "tandem",
        "url": world.server.url,
        "pools": {"unified": {"groups": 2, "tensor_parallel": 1}},
    }


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("pools.unified.tensor_parallel=3", "sizes that work: 1, 2, 4"),
        ("model.max_model_len=129", "longer than tiny-model can; got 129; allowed: at most 128"),
        ("pools.unified.tensor_paralel=2", "did you mean tensor_parallel?"),
        ("pools.unified.tensor_parallel=two", "wrong type"),
        ("model.path=/nowhere/at/all", "/nowhere/at/all does not exist"),
    ],
)
def test_validate_refuses_with_exit_code_2(
    world: World, tiny_model: Path, assignment: str, said: str
) -> None:
    arguments = ("validate", world.file(), "--set", f"model.path={tiny_model}", "--set", assignment)
    done = world.run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    done = world.run(*arguments, "--json")
    failure = json.loads(done.stdout)
    assert (done.exit_code, failure["exit_code"], len(failure["problems"])) == (2, 2, 1)
    assert said in failure["problems"][0]


def test_a_file_that_is_not_there_names_the_shipped_ones(world: World) -> None:
    done = world.run("validate", "nosuch.yaml")
    assert done.exit_code == 2
    assert done.stderr == (
        "nosuch.yaml: no such file; Tandem ships "
        "deploy/cluster.yaml, deploy/local-autoscaled.yaml, deploy/local-disaggregated-tp.yaml, "
        "deploy/local-disaggregated.yaml, deploy/local-tp2.yaml, deploy/local-two-groups.yaml, "
        "deploy/local.yaml\n"
    )


def test_version_names_the_parts(world: World) -> None:
    versions = json.loads(world.run("version", "--json").stdout)
    assert list(versions)[:2] == ["tandem", "python"]
    assert versions["ray"] == "2.60.0"
    assert f"ray           {versions['ray']}" in world.run("version").stdout.splitlines()


def test_every_command_has_help(world: World) -> None:
    for command in ("serve", "deploy", "status", "down", "chat", "validate", "version", "model"):
        done = world.run(command, "--help")
        assert done.exit_code == 0, command
        assert "Usage: " in done.stdout
    assert "Usage: " in world.run().output  # no arguments: the help


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_long_phase_repeats_itself_before_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    phases = Phases(Terminal(), clock=clock)
    phases.start("loading")
    for _ in range(40):  # five seconds
        clock.now += 0.125
        phases.beat()
    assert capsys.readouterr().err.splitlines() == [
        "   0.0 s  loading",
        "   1.9 s  ... loading (2 s)",
        "   3.8 s  ... loading (4 s)",
    ]
    clock.now += 100
    phases.beat()
    capsys.readouterr()
    clock.now += 5
    phases.beat()  # after a minute, every ten seconds do
    assert capsys.readouterr().err == ""


def test_a_quiet_phase_is_only_told_when_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    phases = Phases(Terminal(), is_quiet=True, clock=clock)
    phases.start("asking")
    clock.now += 1.5
    phases.beat()
    assert capsys.readouterr().err == ""
    clock.now += 0.5
    phases.beat()
    assert capsys.readouterr().err == "   2.0 s  ... asking (2 s)\n"


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What `tandem` writes to a real terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from cluster.cli import main; main()", *arguments]
    child = {**os.environ, "TERM": "xterm", **environment}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=child) as process:
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 4096):
                text += chunk
        except OSError:  # the other side is closed
            pass
        process.wait(timeout=60)
    os.close(ours)
    return text.decode()


def test_colour_at_a_terminal_unless_told_otherwise(tiny_model: Path) -> None:
    file = str(Path(__file__).parents[4] / "deploy" / "local.yaml")
    arguments = ("validate", file, "--set", f"model.path={tiny_model}")
    plain = f"{file}: valid"
    coloured = on_a_terminal(*arguments)
    assert coloured.splitlines()[0] == f"\x1b[1;32m{plain}\x1b[0m"
    assert on_a_terminal(*arguments, NO_COLOR="1").splitlines()[0] == f"\x1b[1m{plain}\x1b[0m"  # bold only
    done = subprocess.run(
        [sys.executable, "-c", "from cluster.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[0] == plain


def test_a_disk_that_refuses_is_one_sentence(world: World) -> None:
    (world.folder / "locks").write_text("a file in the place of the folder")
    done = world.run("deploy", world.file(), "--dashboard", world.server.url)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert done.stderr.splitlines()[-1] == f"error: {world.folder / 'locks'}: File exists"


def test_words_that_are_no_text_are_named(world: World) -> None:
    for arguments in (("explain", "a\udcffb"), ("chat", "--system", "a\udcffb")):
        done = world.run(*arguments, "--url", world.server.url, input="hi")
        assert done.exit_code == 1
        assert "a\\udcffb" in done.stderr and done.stderr.endswith(" is no text in UTF-8\n")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("command", ["validate", "deploy", "serve", "scale unified=2 --dashboard URL"])
def test_a_pipe_is_no_deployment_file(world: World, command: str) -> None:
    """Nobody may ever write into it."""
    os.mkfifo(pipe := world.folder / "pipe")
    done = world.run(*command.replace("URL", world.server.url).split(), str(pipe))
    assert "it is no regular file" in done.stderr, done.stderr
    assert world.launcher.calls == []


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", "--timeout-s"),
        ("deploy x.yaml", "--timeout-s"),
        ("scale unified=1", "--timeout-s"),
        ("down", "--timeout-s"),
        ("bench calibrate", "--seconds"),
        ("bench serve", "--ttft --tpot --timeout-s"),
        ("bench replay x.csv", "--length-divisor --rate-divisor --ttft --tpot --timeout-s"),
        ("plan", "--efficiency --ttft --tpot --rate --length-divisor --rate-divisor"),
        ("simulate x.csv", "--length-divisor --rate-divisor --transfer"),
        ("dashboards check", "--minutes"),
        ("dashboards preview", "--minutes"),
    ],
)
def test_a_number_that_is_none_is_refused(world: World, command: str, options: str) -> None:
    for option in options.split():
        for value in ("nan", "inf"):
            done = world.run(*command.split(), option, value)
            assert done.exit_code == 2, (option, value)
            assert f"Invalid value for '{option}'" in done.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("bench replay x.csv", "--length-divisor --rate-divisor"),
        ("plan", "--ttft --tpot --rate --length-divisor --rate-divisor"),
        ("simulate x.csv", "--length-divisor --scale-lengths --rate-divisor --scale-rate --transfer"),
    ],
)
def test_what_is_divided_by_is_above_zero(world: World, command: str, options: str) -> None:
    for option in options.split():
        for value in ("0", "-1"):
            done = world.run(*command.split(), f"{option}={value}")
            assert (done.exit_code, f"{value} is not above 0." in done.stderr) == (2, True), (option, value)
