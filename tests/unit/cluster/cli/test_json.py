"""`--json` of every command: one document on standard output, or as its help says a document a line; of a
failure too. What is said meanwhile is JSON on standard error."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command
from typer.testing import Result

from cluster.bench.client import ServedModel
from cluster.bench.latency import Outcome
from cluster.bench.load import LoadRun
from cluster.cli.commands import app
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU
from cluster.launch.ports import free_port
from tests.unit.cluster.cli.test_explain_command import FOUND
from tests.unit.cluster.conftest import World
from tests.unit.cluster.tiny_gguf import write_tiny_gguf
from tests.unit.dashboards.grafana_double import TOKEN, GrafanaDouble

NOBODY = "http://127.0.0.1:1"


@dataclass(frozen=True)
class Case:
    """Arguments of a command with which it works, and with which it fails; places in braces are filled in."""

    works: str
    fails: str | None
    num_lines: int | None = None  # of a command that prints a document a line


CASES = {
    "serve": Case("{file}", "{file}.no", num_lines=2),
    "deploy": Case("{file} --dashboard {url}", "{file}.no"),
    "scale": Case("unified=3 {file} --yes --dashboard {url}", "unified=x"),
    "status": Case("--dashboard {url}", f"--dashboard {NOBODY}"),
    "explain": Case("cmpl-1 --url {url}", "cmpl-2 --url {url}"),
    "down": Case("--dashboard {url}", f"--dashboard {NOBODY}"),
    "chat": Case("--url {url}", f"--url {NOBODY}", num_lines=1),
    "validate": Case("{file} --set model.path={model}", "{file} --set model.pat=x"),
    "plan": Case("llama-2-7b --device h100", "llama-2-7b --device abacus"),
    "version": Case("", None),
    "simulate": Case("{trace} --policy all", "{trace} --policy none", num_lines=4),
    "model fetch": Case("", None),
    "model path": Case("{model}", "{model}.no"),
    "model inspect": Case("{model}", "{model}.no"),
    "model quantize": Case("{model} --to int8 -o {out}", "{model} --to int3 -o {out}"),
    "model convert": Case("{gguf} -o {out}", "{gguf}.no -o {out}"),
    "bench calibrate": Case("{model}", "{model} --dtype float16"),
    "bench sweep": Case("{model} --prompt 64 --output 32 -o {out}", "{model} --batches x"),
    "bench kv-cache": Case("{model} --prompt 16 --output 32", "{model} --prompt 500"),
    "bench serve": Case("--requests 2", "--rate 0"),
    "bench replay": Case("{trace}", "{trace}.no"),
    "dashboards build": Case("-o {out}", "-o /proc/none"),
    "dashboards check": Case("--prometheus {prometheus}", f"--prometheus {NOBODY}"),
    "dashboards push": Case(
        "--grafana {grafana} --token-file {token}", f"--grafana {NOBODY} --token-file {{token}}", num_lines=5
    ),
    "dashboards preview": Case("--prometheus {prometheus} -o {out}", f"--prometheus {NOBODY} -o {{out}}"),
    "metrics up": Case("--target {target} --port {port}", "--api-keys-file x", num_lines=2),
}
# Of metrics up: a Prometheus that ends by itself. Of dashboards check: one that knows nothing.
ENDS_WITH_1 = ("metrics up", "dashboards check")

# Answers the question whether it is ready, and ends.
PROMETHEUS = f"""#!{sys.executable}
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3].rpartition(":")[2])), Handler).handle_request()
"""


class EmptyPrometheus(BaseHTTPRequestHandler):
    """Has no series."""

    def do_POST(self) -> None:
        body = json.dumps({"status": "success", "data": {"result": []}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def places(world: World, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What the arguments name."""
    folder = world.folder
    entry = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}
    (folder / "trace.jsonl").write_text(json.dumps(entry))
    (folder / "token").write_text(TOKEN)
    program = folder / "bin" / "prometheus"
    program.parent.mkdir()
    program.write_text(PROMETHEUS)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent))
    write_tiny_gguf(folder / "tiny.gguf")
    world.server.explained = {"cmpl-1": FOUND}
    world.server.details = {
        "applications": {"tandem": {"status": "RUNNING", "deployments": {}}},
        "http_options": {"host": "127.0.0.1", "port": world.server.port},
    }
    prometheus = ThreadingHTTPServer(("127.0.0.1", 0), EmptyPrometheus)
    thread = threading.Thread(target=prometheus.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    with GrafanaDouble() as grafana:
        yield {
            "file": world.file(),
            "url": world.server.url,
            "model": str(tiny_model),
            "trace": str(folder / "trace.jsonl"),
            "out": str(folder / "out"),
            "gguf": str(folder / "tiny.gguf"),
            "grafana": grafana.url,
            "token": str(folder / "token"),
            "prometheus": f"http://127.0.0.1:{prometheus.server_port}",
            "target": f"127.0.0.1:{world.server.port}",
            "port": str(free_port()),
        }
    prometheus.shutdown()
    prometheus.server_close()
    thread.join(timeout=5)


def measured(command: str) -> dict[str, Any]:
    """What the measuring programs give; of a GPU, for there the pool is not planned again."""
    if command == "bench calibrate":
        about = {
            "model_hash": "f" * 64,
            "dtype": "bfloat16",
            "quantization": "none",
            "tensor_parallel": 1,
            "device": "cuda",
        }
        return {
            "cost": asdict(SMOLLM2_ON_SMALL_CPU), "about": about, "samples": [], "checks": [], "pool": {},
        }  # fmt: skip
    return {"kind": command, "samples": [1], "rows": []}


def documents(text: str) -> list[dict[str, Any]]:
    """Of lines that are JSON by the letter: no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert all(isinstance(document, dict) for document in found), text
    return found


def all_commands(group: TyperGroup, before: str = "") -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from all_commands(command, f"{before}{name} ")
        else:
            assert isinstance(command, TyperCommand)
            yield f"{before}{name}", command


def test_every_command_has_it_and_its_help_says_in_which_form() -> None:
    main = get_command(app)
    assert isinstance(main, TyperGroup)
    found = dict(all_commands(main))
    assert found.keys() == CASES.keys()
    for name, command in found.items():
        option = next(param for param in command.params if param.name == "as_json")
        assert isinstance(option, TyperOption) and option.help is not None
        form = "Print one JSON document" if CASES[name].num_lines is None else "Print JSON, a line for"
        assert option.help.startswith(form), name


def run(world: World, name: str, arguments: str, places: dict[str, str]) -> Result:
    if name == "serve":
        world.stop_when_noted(signal.SIGTERM)
    outcome = Outcome(
        number=0, due_s=0.0, sent_s=0.0, token_s=(0.1,), end_s=0.1,
        prompt_tokens=9, output_tokens=1, cached_tokens=0,
    )  # fmt: skip
    world.measured = measured(name)
    world.loaded = LoadRun(ServedModel(name="m", max_model_len=512), [outcome])
    return world.run(*name.split(), *arguments.format(**places).split(), "--json", input="hi")


@pytest.mark.parametrize("name", CASES)
def test_results_are_one_document_or_a_document_a_line(
    world: World, name: str, places: dict[str, str]
) -> None:
    done = run(world, name, CASES[name].works, places)
    assert done.exit_code == (1 if name in ENDS_WITH_1 else 0), done.output
    assert len(documents(done.stdout)) == (CASES[name].num_lines or 1), done.stdout
    assert {said["event"] for said in documents(done.stderr)} <= {"phase", "note"}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fails is not None])
def test_so_is_a_failure(world: World, name: str, places: dict[str, str]) -> None:
    done = run(world, name, str(CASES[name].fails), places)
    (problem,) = documents(done.stdout)
    assert (problem["event"], problem["exit_code"]) == ("error", done.exit_code), done.stdout
    assert done.exit_code in (1, 2) and problem["message"]
    assert {said["event"] for said in documents(done.stderr)} <= {"phase"}


@pytest.mark.parametrize(
    "arguments", ["plan --rate nan", "simulate", "bench sweep --runs 0", "dashboards chek"]
)
def test_so_is_what_the_parser_refuses(world: World, arguments: str) -> None:
    done = world.run(*arguments.split(), "--json")
    (problem,) = documents(done.stdout)
    assert (done.exit_code, done.stderr, problem["event"], problem["exit_code"]) == (2, "", "error", 2)
    assert "--rate" in problem["message"] or "nan" not in arguments


def test_a_failure_after_the_document_is_told_beside_it(world: World, places: dict[str, str]) -> None:
    """As of a disk that is full when the report is to be written."""
    done = run(world, "bench sweep", "{model} --prompt 64 --output 32 -o /dev/full", places)
    assert done.exit_code == 1
    (document,) = documents(done.stdout)
    assert document["kind"] == "bench sweep"
    assert documents(done.stderr)[-1]["message"] == "/dev/full: No space left on device"


def test_numbers_that_json_does_not_know_are_not_printed(world: World, places: dict[str, str]) -> None:
    world.server.explained = {"cmpl-1": {**FOUND, "replica": float("nan")}}
    done = run(world, "explain", CASES["explain"].works, places)
    (problem,) = documents(done.stdout)
    assert done.exit_code == 1 and re.match("the result cannot be said in JSON: ", problem["message"])
