"""However a command ends: what it started is taken back, and what went wrong is one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.rollout import Rollout
from cluster.cli.signals import interrupts
from cluster.launch.local_cluster import LocalCluster
from cluster.launch.news import Report
from cluster.running.note import RunningCluster
from cluster.running.process import process_start
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.conftest import World
from tests.unit.cluster.fakes import FakeLauncher

# `tandem serve` on a fake cluster, in a process of its own.
PROGRAM = """
import sys
from pathlib import Path
from cluster.cli.commands import app
from cluster.cli.services import Services
from cluster.running.note import RunningNote
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.fakes import FakeLauncher, embedded_model
url, folder, file = sys.argv[1:]
launcher = FakeLauncher(ServeApi(url), Path(folder))
note = RunningNote(Path(folder) / "run")
services = Services(
    launcher=launcher,
    handover=launcher,
    reserved_port=launcher.reserved_port,
    ensure_model=embedded_model(Path(folder)),
    note=note,
)
try:
    app(["serve", file], obj=services)
finally:
    Path(folder, "calls").write_text("\\n".join(launcher.calls))
"""
ROOT = Path(__file__).parents[4]


class SlowLauncher(FakeLauncher):
    """Its stop is interrupted, as by a person who presses Ctrl-C again; then some processes had to die."""

    def stop_all(self, cluster: LocalCluster, *, grace_s: float) -> list[str]:
        super().stop_all(cluster, grace_s=grace_s)
        if grace_s > 0:
            raise KeyboardInterrupt
        return ["17 ray::WorkerGroup"]


def test_a_second_ctrl_c_stops_at_once_and_names_what_was_killed(world: World) -> None:
    world.launcher = SlowLauncher(ServeApi(world.server.url), world.folder)
    world.stop_when_noted(signal.SIGINT)
    done = world.run("serve", world.file())
    assert done.exit_code == 0
    assert world.launcher.calls[-2:] == ["stop 35", "stop 0"]
    said = done.stderr.splitlines()[-1]
    assert said.endswith("these did not end by themselves and were killed: 17 ray::WorkerGroup")
    assert done.stdout.splitlines()[-1] == "stopped"


def test_a_reader_that_left_does_not_keep_the_cluster_alive(world: World) -> None:
    """`tandem serve | tee log`: Ctrl-C ends tee first, and the next line finds a broken pipe."""
    command = [sys.executable, "-c", PROGRAM, world.server.url, str(world.folder), world.file()]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    while b"Talk to it" not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    assert (world.folder / "calls").read_text().splitlines()[-1] == "stop 35"


def test_ctrl_c_while_it_starts_takes_back_what_there_is(world: World) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    world.launcher.on_ready = interrupt
    assert world.run("serve", world.file()).exit_code == 0
    assert world.launcher.calls[-1] == "stop 35"


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class InterruptedLauncher(FakeLauncher):
    """Ctrl-C comes while Serve is given the deployment."""

    def deploy(self, api: ServeApi, config: Mapping[str, Any], *, report: Report, timeout_s: float) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_deploy_says_what_holds_now(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    arguments = ("deploy", world.file(), "--dashboard", world.server.url)
    world.launcher.on_ready = interrupt
    done = world.run(*arguments)
    assert done.exit_code == 130
    assert done.stderr.endswith("\nerror: interrupted; Serve goes on with it; see `tandem status`\n")
    world.launcher = InterruptedLauncher(ServeApi(world.server.url), world.folder)
    done = world.run(*arguments)
    assert done.exit_code == 130
    assert done.stderr.endswith("\nerror: interrupted; Serve may have taken it; see `tandem status`\n")
    assert world.server.puts == []  # nothing was taken back
    checks = vars(sys.modules[Rollout.__module__])
    monkeypatch.setitem(checks, "check_model", lambda deployment: interrupt())
    done = world.run(*arguments)
    assert done.exit_code == 130 and done.stderr.endswith("\nerror: interrupted; nothing was changed\n")


def test_a_scale_interrupted_while_serve_is_asked_keeps_the_file_that_it_may_have(world: World) -> None:
    file = Path(world.file())
    world.launcher = InterruptedLauncher(ServeApi(world.server.url), world.folder)
    done = world.run("scale", "unified=3", str(file), "--yes", "--dashboard", world.server.url)
    assert done.exit_code == 130
    (entry,) = json.loads(file.read_text())["applications"][0]["deployments"]
    assert entry == {"name": "unified", "num_replicas": 3}


def test_the_lock_of_a_deploy_goes_with_it(world: World) -> None:
    world.launcher.failure = "deployment failed: x"
    for _ in range(2):
        done = world.run("deploy", world.file(), "--dashboard", world.server.url)
        assert done.exit_code == 1 and done.stderr.endswith("\nerror: deployment failed: x\n")


def note_of(pid: int, url: str, *, gcs_address: str) -> RunningCluster:
    return RunningCluster(
        pid=pid,
        dashboard_url=url,
        gcs_address=gcs_address,
        api_url=url,
        application="tandem",
        file="x",
        process_start=process_start(pid) or 0,
    )


def test_down_waits_until_the_cluster_that_serve_started_is_gone(world: World) -> None:
    """The fake serve ends at once; its cluster's dashboard goes a little later, and only then is it down."""
    serving = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    left = threading.Event()

    def close_the_dashboard() -> None:
        serving.wait(timeout=20)
        world.server.answers_dashboard = False
        left.set()

    world.note.write(note_of(serving.pid, world.server.url, gcs_address="127.0.0.1:1"))
    threading.Thread(target=close_the_dashboard, daemon=True).start()
    try:
        done = world.run("down")
        assert (done.exit_code, left.is_set()) == (0, True)
    finally:
        serving.kill()


def test_processes_are_known_by_id_and_start() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected
    assert process_start(child.pid) is None
    child.wait()
    assert process_start(child.pid) is None


@pytest.mark.parametrize("url", ["nonsense", "http://[", "http://127.0.0.1:port", "http://me:secret@a:1"])
def test_urls_that_are_none_and_those_with_passwords_are_refused_in_words(world: World, url: str) -> None:
    for *command, option in (
        ("status", "--dashboard"),
        ("down", "--dashboard"),
        ("metrics", "up", "--dashboard"),
        ("chat", "--url"),
        ("explain", "x", "--url"),
        ("bench", "serve", "--url"),
    ):
        done = world.run(*command, option, url, input="hi")
        assert done.exit_code == 2, command
        assert f"Invalid value for '{option}': it must be " in done.stderr and "secret" not in done.output


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[]", b"\xff", b'{"applications": []}', b'{"applications": {"tandem": 1}}']
)
def test_something_else_at_the_address_is_said(world: World, answer: bytes) -> None:
    world.server.details = answer  # type: ignore[assignment]  # another program listens there
    done = world.run("status", "--dashboard", world.server.url)
    assert (done.exit_code, done.stderr) == (
        1,
        f"error: what answers at {world.server.url} is not a Ray dashboard\n",
    )
