"""`tandem serve`, `deploy` and `down` against a fake cluster."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli.serve import command_as_typed
from cluster.running.note import RunningCluster
from cluster.running.process import process_start
from tests.unit.cluster.conftest import World


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_answers_once_and_stops_all_at_a_signal(world: World, number: signal.Signals) -> None:
    world.stop_when_noted(number)
    done = world.run("serve", world.file())
    port, url = world.server.port, world.server.url
    assert done.exit_code == 0
    assert world.launcher.calls == [
        f"reserve 127.0.0.1 {port}",
        "start",
        "deploy",
        f"wait_ready tandem {url}",
        "stop 35",
    ]
    phases = [line for line in done.stderr.splitlines() if "s  ... " not in line]  # repeated when slow
    assert [line.split(" s  ", 1)[-1] for line in phases] == [
        "found SmolLM2-135M-Instruct",
        "starting a local Ray cluster",
        "handing the deployment to Serve",
        f"serving at {url}",
        "asking it a first question",
        "stopping; requests in flight have 30 s, Ctrl-C again stops at once",
    ]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ready in ")
    assert "  Fake: Paris." in lines
    assert f"API        {url}/v1" in lines
    assert f"curl {url}/v1/chat/completions -H 'content-type: application/json' \\" in lines
    assert f'client = OpenAI(base_url="{url}/v1", api_key="none")' in lines
    assert lines[-1] == "stopped"
    assert world.note.read() is None
    assert "\x1b" not in done.output  # no colour when not a terminal


def test_a_model_without_a_chat_template_is_served_and_asked_for_a_completion(world: World) -> None:
    world.server.has_template = False
    world.stop_when_noted(signal.SIGTERM)
    done = world.run("serve", world.file())
    assert done.exit_code == 0
    lines, url = done.stdout.splitlines(), world.server.url
    assert "  Fake: Lyon." in lines
    assert f"curl {url}/v1/completions -H 'content-type: application/json' \\" in lines
    question = "What is the capital of France?"
    assert f'answer = client.completions.create(model="Fake", prompt="{question}")' in lines
    assert any(line.startswith("No chat template: /v1/completions only     What runs: ") for line in lines)
    assert "chat.completions" not in done.stdout


def test_the_curl_and_the_python_snippet_work_as_they_are_printed(world: World) -> None:
    world.stop_when_noted(signal.SIGTERM)
    text = world.run("serve", world.file()).stdout
    snippet = text[text.index("from openai") : text.index("Talk to it")]
    compile(snippet, "snippet", "exec")
    curl = text[text.index("curl ") : text.index("from openai")]
    done = subprocess.run(
        ["bash", "-c", f"set -- {curl}\nprintf '%s' \"${{@: -1}}\""], capture_output=True, check=True
    )
    assert json.loads(done.stdout) == {
        "model": "Fake",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }


def test_other_commands_are_told_as_they_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / ".venv" / "bin" / "tandem"
    command.parent.mkdir(parents=True)
    command.write_text("")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_as_typed(str(command), tmp_path) == ".venv/bin/tandem"
    assert command_as_typed(str(command), tmp_path / "other") == str(command)
    assert command_as_typed("/usr/bin/pytest", tmp_path) == "tandem"
    monkeypatch.setenv("PATH", str(command.parent))
    assert command_as_typed(str(command), tmp_path) == "tandem"


def test_serve_tells_programs_in_json(world: World) -> None:
    world.stop_when_noted(signal.SIGTERM)
    done = world.run("serve", world.file(), "--json")
    ready, stopped = (json.loads(line) for line in done.stdout.splitlines())
    assert (ready["event"], stopped) == ("ready", {"event": "stopped"})
    assert {json.loads(line)["event"] for line in done.stderr.splitlines()} == {"phase"}
    assert (ready["url"], ready["model"], ready["first_answer"]) == (world.server.url, "Fake", "Paris.")


def test_port_and_set_change_what_serve_receives(world: World) -> None:
    world.stop_when_noted(signal.SIGTERM)
    file = world.file(http_options={"host": "127.0.0.1", "port": 9000})
    port = str(world.server.port)
    done = world.run(
        "serve", file, "--port", port, "--set", "router.policy=round_robin", "--set", "model.max_model_len=64"
    )
    assert done.exit_code == 0
    config = world.launcher.configs[0]
    assert config["http_options"] == {"host": "127.0.0.1", "port": world.server.port}
    assert config["applications"][0]["args"] == {
        "model": {"path": "embedded", "max_model_len": 64},
        "router": {"policy": "round_robin"},
    }


def test_serve_without_a_file_takes_the_shipped_one(world: World) -> None:
    world.stop_when_noted(signal.SIGTERM)
    assert world.run("serve", "--port", str(world.server.port)).exit_code == 0
    assert world.launcher.configs[0]["applications"][0]["import_path"] == "cluster.app:build"


def test_a_taken_port_ends_it_before_anything_starts(world: World) -> None:
    world.launcher.taken_port = world.server.port
    done = world.run("serve", world.file())
    assert done.exit_code == 1
    assert done.stderr == f"error: port {world.server.port} on 127.0.0.1 cannot be used\n"
    assert world.launcher.calls == [f"reserve 127.0.0.1 {world.server.port}"]


def test_mistakes_end_it_before_anything_starts(world: World) -> None:
    done = world.run("serve", world.file(), "--set", "router.polic=x", "--port", "80")
    assert (done.exit_code, world.launcher.calls) == (2, [])
    lines = done.stderr.splitlines()
    assert lines[0] == "command line:--port: port out of range; got 80; allowed: 1024 to 65535"
    assert lines[1].startswith("command line:router.polic: unknown key; got 'polic'")
    assert lines[1].endswith("did you mean policy?")


def test_a_failed_start_is_told_and_taken_back(world: World) -> None:
    world.launcher.failure = "deployment failed: no room"
    done = world.run("serve", world.file())
    assert done.exit_code == 1 and done.stderr.endswith("\nerror: deployment failed: no room\n")
    assert world.launcher.calls[-1] == "stop 35"


def test_a_server_that_is_ready_but_does_not_answer_is_a_failure(world: World) -> None:
    world.server.chat_status = 503
    done = world.run("serve", world.file())
    assert done.exit_code == 1
    assert "says it is ready but does not answer a request" in done.stderr
    assert world.launcher.calls[-1] == "stop 35"


def test_a_cluster_that_dies_is_noticed(world: World) -> None:
    def die() -> None:
        assert world.launcher.head is not None
        world.launcher.head.kill()

    world.launcher.on_ready = die
    done = world.run("serve", world.file())
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        1,
        "error: the Ray cluster ended by itself; start again",
    )


def test_serve_on_a_cluster_that_exists_takes_back_only_its_deployment(world: World) -> None:
    world.stop_when_noted(signal.SIGTERM)
    done = world.run("serve", world.file(), "--dashboard", world.server.url)
    assert done.exit_code == 0
    assert world.launcher.calls == ["deploy", f"wait_ready tandem {world.server.url}"]
    assert world.server.puts[-1]["applications"] == []


def test_serve_does_not_replace_what_runs_on_a_cluster(world: World) -> None:
    world.server.details = {"applications": {"other": {}}}
    done = world.run("serve", world.file(), "--dashboard", world.server.url)
    assert (done.exit_code, world.launcher.calls) == (1, [])
    assert "already runs other; change it with `tandem deploy" in done.stderr


def test_deploy_waits_until_ready(world: World) -> None:
    done = world.run("deploy", world.file(), "--dashboard", world.server.url)
    assert done.exit_code == 0
    assert world.launcher.calls == ["deploy", f"wait_ready tandem {world.server.url}"]
    assert done.stdout.splitlines()[-1].endswith(f"at {world.server.url}")
    world.launcher.calls.clear()
    assert world.run("deploy", world.file(), "--dashboard", world.server.url, "--no-wait").exit_code == 0
    assert world.launcher.calls == ["deploy"]


def test_deploy_without_a_cluster_says_how_to_get_one(world: World) -> None:
    done = world.run("deploy", world.file(), "--dashboard", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "start one with `tandem serve` or `ray start --head`" in done.stderr
    assert world.launcher.calls == []


def test_what_serve_cannot_change_is_refused_with_both_values(world: World) -> None:
    world.server.details = {
        "applications": {"tandem": {}},
        "http_options": {"host": "127.0.0.1", "port": 7999},
        "proxy_location": "EveryNode",
    }
    done = world.run("deploy", world.file(), "--dashboard", world.server.url)
    assert (done.exit_code, world.launcher.calls) == (2, [])
    port, location = done.stderr.splitlines()[-2:]
    assert "http_options.port: needs a new deployment" in port
    assert f"got 7999 -> {world.server.port}" in port
    assert "got 'EveryNode' -> 'HeadOnly'" in location


def test_a_second_deploy_names_the_first(world: World) -> None:
    locks = world.folder / "locks"
    locks.mkdir()
    name = hashlib.sha256(world.server.url.encode()).hexdigest()[:16]
    with (locks / f"deploy-{name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write("somebody, process 7")
        stream.flush()
        done = world.run("deploy", world.file(), "--dashboard", world.server.url)
    assert (done.exit_code, world.launcher.calls) == (1, [])
    assert "is under way, by somebody, process 7; wait for it or end it" in done.stderr


def test_down_removes_what_is_deployed(world: World) -> None:
    world.server.details = {"applications": {"tandem": {}}, "http_options": {"port": 8000}}
    done = world.run("down", "--dashboard", world.server.url)
    assert done.exit_code == 0
    assert world.server.puts == [{"http_options": {"port": 8000}, "applications": []}]


def test_down_asks_for_nothing_where_nothing_is_deployed(world: World) -> None:
    """Serve would start for it, on its own port, and keep it whatever a deployment says later."""
    world.server.details = {"applications": {}}
    assert world.run("down", "--dashboard", world.server.url).exit_code == 0
    assert world.server.puts == []


def test_down_ends_a_running_serve(world: World) -> None:
    serving = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        world.note.write(
            RunningCluster(
                pid=serving.pid,
                dashboard_url=world.server.url,
                gcs_address="",  # it runs on a cluster that stays
                api_url=world.server.url,
                application="tandem",
                file="x",
                process_start=process_start(serving.pid) or 0,
            )
        )
        assert world.run("down").exit_code == 0  # found without --dashboard
        assert serving.wait(timeout=10) == -signal.SIGTERM
    finally:
        serving.kill()
        serving.wait(timeout=10)


def test_a_note_of_another_process_with_the_same_id_counts_as_absent(world: World) -> None:
    note = RunningCluster(
        pid=os.getpid(),
        dashboard_url="http://x",
        gcs_address="",
        api_url="http://x",
        application="tandem",
        file="x",
        process_start=process_start(os.getpid()) or 0,
    )
    world.note.write(note)
    assert world.note.read() == note
    file = world.folder / "run" / f"running-{os.getpid()}.json"
    assert oct(file.stat().st_mode)[-3:] == "600"
    file.write_text(json.dumps({**json.loads(file.read_text()), "process_start": 1}))
    assert world.note.read() is None
    file.write_text("[]")
    assert world.note.read() is None


def test_of_two_clusters_each_is_found_and_the_one_that_stays_is_found_after_the_other(world: World) -> None:
    others = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        first, second = (
            RunningCluster(
                pid=process.pid,
                dashboard_url=f"http://127.0.0.1:{number}",
                gcs_address="",
                api_url=f"http://127.0.0.1:{number}000",
                application="tandem",
                file="x",
                process_start=process_start(process.pid) or 0,
            )
            for number, process in enumerate(others, start=1)
        )
        world.note.write(first)
        world.note.write(second)
        assert world.note.all() == [second, first]
        assert world.note.read() == second
        assert (world.note.at(first.dashboard_url), world.note.at("http://127.0.0.1:3")) == (first, None)
        world.note.mark_stopping(first.pid)
        error = world.run("status", "--dashboard", first.dashboard_url).stderr
        assert error == f"error: `tandem serve` (process {first.pid}) is stopping\n"
        world.note.remove(second.pid)
        assert world.note.read() == replace(first, is_stopping=True)
        others[0].kill()
        others[0].wait(timeout=10)
        assert world.note.all() == []
        world.note.write(second)  # clears away what the other left
        assert [file.name for file in (world.folder / "run").iterdir()] == [f"running-{second.pid}.json"]
    finally:
        for process in others:
            process.kill()
            process.communicate(timeout=10)


def test_serve_ends_when_another_command_takes_its_application_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.serve._LOOK_S", 0.3)

    def take_away() -> None:
        world.server.details = {"applications": {"tandem": {"status": "RUNNING"}}}
        threading.Timer(1.5, world.server.details["applications"].clear).start()

    world.launcher.on_ready = take_away
    done = world.run("serve", world.file())
    assert done.exit_code == 0
    assert "the application was taken away by another command: nothing is served" in done.stdout
    assert done.stdout.splitlines()[-1] == "stopped"


def test_without_a_note_the_commands_that_are_named_say_where(world: World) -> None:
    (world.folder / "run").write_text("")  # no folder: notes cannot be written, not even by root
    world.stop_when_noted(signal.SIGTERM)
    done = world.run("serve", world.file())
    lines, url = done.stdout.splitlines(), world.server.url
    assert any(
        line.startswith("note: other tandem commands need --url and --dashboard now: ") for line in lines
    )
    ends = f"chat --url {url}     What runs: tandem status --dashboard {url}     End: Ctrl-C"
    assert f"Talk to it: tandem {ends}" in lines


def test_being_stopped_before_anything_has_started_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(world.launcher, "start_local_cluster", interrupted)
    done = world.run("serve", world.file())
    assert (done.exit_code, done.stdout) == (0, "stopped\n")
