"""`tandem serve` as a process: what SIGTERM with answers in flight does to clients, processes and port.

The command is started twice, by the same user and on the same port: what the first one left would be in the
way of the second.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.launch.local_cluster import LocalCluster
from cluster.launch.marked import MARK
from cluster.launch.ports import check_port, free_port
from tests.integration.serving import processes, wait_for

pytestmark = pytest.mark.integration

GRACE_S = 10.0  # for answers in flight, as the command says
START_S, END_S = 180.0, 60.0  # patience on a busy machine
LATE_CODES = ("no_application", "no_ready_group", "no_healthy_group", "draining")
ENDED_CODES = ("engine_dead", "group_failed", "group_stopped", "group_draining", "not_connected")
KILLED_S = 15.0  # until all is gone after SIGKILL


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home of its own, for Ray's token and the note of what runs; the model and the kernels are shared."""
    home = tmp_path_factory.mktemp("home")
    cache = home / ".cache" / "tandem"
    cache.mkdir(parents=True)
    for name in ("models", "kernels"):
        shared = Path.home() / ".cache" / "tandem" / name
        shared.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(shared)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", MARK))}
    return environment | {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}


@contextmanager
def tandem_serve(environment: dict[str, str], port: int) -> Iterator[subprocess.Popen[str]]:
    """The command, once it is ready."""
    command = [sys.executable, "-c", "from cluster.cli import main; main()", "serve", "--json"]
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: process.poll() is not None or is_ready(port), START_S, "it is not ready")
        assert process.poll() is None, "it ended by itself"
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=END_S)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def stream(port: int, body: dict[str, Any]) -> list[str]:
    """The data of the lines of a streamed answer, to its end."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=30.0, trust_env=False) as answer:
        assert answer.status_code == 200
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]


def refusal(port: int, body: dict[str, Any]) -> httpx.Response | None:
    """The first answer to new requests that is not the one asked for; None when the connection is refused."""
    url = f"http://127.0.0.1:{port}/v1/completions"

    def ask() -> list[httpx.Response | None]:
        try:
            answer = httpx.post(url, json=body, timeout=20.0, trust_env=False)  # it may wait for a group
        except httpx.ConnectError:
            return [None]
        return [answer] if answer.status_code != 200 else []

    return wait_for(ask, GRACE_S, "new requests are still taken")[0]


def cluster_mark(child_of: int) -> str:
    """The mark of the cluster that a `tandem serve` has started."""
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if parent == str(child_of) and variable.startswith(f"{MARK}=".encode()):
                return variable.decode().partition("=")[2]
    raise AssertionError(f"process {child_of} has not started a cluster")


def test_termination_lets_answers_finish_and_leaves_nothing(environment: dict[str, str], port: int) -> None:
    """An answer that outlives the grace ends with an error."""
    body = {"prompt": "Tell a long story.", "max_tokens": 150, "ignore_eos": True}
    with tandem_serve(environment, port) as process, concurrent.futures.ThreadPoolExecutor(4) as pool:
        mark = cluster_mark(process.pid)
        assert processes(mark, "raylet")
        model = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).json()["data"][0]["id"]
        body["model"] = model
        streams = [pool.submit(stream, port, body) for _ in range(3)]
        longer = pool.submit(stream, port, {**body, "max_tokens": 8000})
        wait_for(lambda: running(port) == 4, 10.0, "the four do not run")
        process.send_signal(signal.SIGTERM)
        terminated = time.monotonic()
        assert not any(future.done() for future in streams)
        late = refusal(port, {**body, "max_tokens": 1})
        if late is not None:
            assert late.status_code == 503, late.text
            assert late.json()["error"]["code"] in LATE_CODES
            assert int(late.headers["retry-after"]) >= 1
        for future in streams:
            lines = future.result(timeout=GRACE_S)
            assert lines[-1] == "[DONE]"
            assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        assert time.monotonic() - terminated < GRACE_S
        *tokens, last = longer.result(timeout=END_S)
        assert "[DONE]" not in tokens
        assert json.loads(tokens[-1])["choices"]
        assert json.loads(last)["error"]["code"] in ENDED_CODES
        assert process.wait(END_S) == 0
    assert processes(mark, "") == []
    check_port("127.0.0.1", port)


def test_killing_the_command_leaves_nothing(
    environment: dict[str, str], port: int, cluster: LocalCluster
) -> None:
    """Nor does it touch another cluster of the same user."""
    with tandem_serve(environment, port) as process:
        mark = cluster_mark(process.pid)
        assert processes(mark, "raylet")
        process.kill()
        wait_for(lambda: not processes(mark, ""), KILLED_S, "processes live on")
        check_port("127.0.0.1", port)
    assert processes(cluster.mark, "raylet")
    assert cluster.api.is_reachable()


def running(port: int) -> int:
    """Requests in the engine."""
    load = httpx.get(f"http://127.0.0.1:{port}/load", timeout=5.0, trust_env=False).json()
    return sum(group["running"] for group in load["groups"])
