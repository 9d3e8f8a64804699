"""Commands against a service that wants an API key, under a prefix, or one that is being stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from cluster.launch.errors import LaunchError
from cluster.launch.handover import wait_ready
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.conftest import World

KEY = "sk-the-first"


@pytest.fixture
def keys_file(world: World) -> Path:
    file = world.folder / "keys"
    file.write_text(f"# ours\n\n{KEY}\nsk-another\n")
    file.chmod(0o600)
    world.server.key = KEY
    return file


def test_serve_and_deploy_send_the_first_key_of_the_file(world: World, keys_file: Path) -> None:
    option = f"router.http.api_keys_file={keys_file}"
    world.stop_when_noted(signal.SIGTERM)
    done = world.run("serve", world.file(), "--set", option)
    assert done.exit_code == 0, done.stderr
    assert world.server.chats  # the first question was answered
    assert KEY not in done.stdout
    assert "authorization: Bearer KEY" in done.stdout and 'api_key="KEY"' in done.stdout
    assert world.run("deploy", world.file(), "--set", option, "--dashboard", world.server.url).exit_code == 0
    assert world.launcher.headers == [{"authorization": f"Bearer {KEY}"}] * 2


def test_waiting_until_ready_uses_the_key_and_says_when_it_is_refused(world: World, keys_file: Path) -> None:
    world.server.details = {"applications": {"tandem": {"status": "RUNNING"}}}
    api = ServeApi(world.server.url)
    headers = {"authorization": f"Bearer {KEY}"}
    wait_ready(api, application="tandem", url=world.server.url, headers=headers, timeout_s=5)
    with pytest.raises(LaunchError, match="refuses the API key"):
        wait_ready(api, application="tandem", url=world.server.url, timeout_s=5)


def test_chat_and_status_take_a_file_of_keys(world: World, keys_file: Path) -> None:
    asked = ("chat", "--url", world.server.url)
    assert world.run(*asked, input="hi").stderr == (
        f"error: {world.server.url}/v1/models: a key is needed (status 401, retry after 3 s); "
        "give --api-keys-file FILE\n"
    )
    done = world.run(*asked, "--api-keys-file", str(keys_file), input="hi")
    assert (done.exit_code, done.stdout) == (0, "Paris. Yes\n")
    missing = world.run(*asked, "--api-keys-file", str(keys_file) + "x", input="hi")
    assert (missing.exit_code, missing.stderr) == (
        1, f"error: API key file {keys_file}x cannot be read: No such file or directory\n")  # fmt: skip
    keys_file.chmod(0o644)
    assert "other users may use it" in world.run(*asked, "--api-keys-file", str(keys_file), input="hi").stderr
    keys_file.chmod(0o600)
    keys_file.write_text("schlüssel\nsk-another\n")
    assert "is not ASCII" in world.run(*asked, "--api-keys-file", str(keys_file), input="hi").stderr


def test_a_service_under_a_prefix_is_asked_there(world: World) -> None:
    world.server.prefix = "/llm"
    tree = json.loads(Path(world.file()).read_text())
    tree["applications"][0]["route_prefix"] = "/llm"
    file = world.file(applications=tree["applications"])
    world.stop_when_noted(signal.SIGTERM)
    done = world.run("serve", file)
    assert done.exit_code == 0, done.stderr
    assert f"wait_ready tandem {world.server.url}/llm" in world.launcher.calls
    assert f"curl {world.server.url}/llm/v1/chat/completions" in done.stdout


@pytest.mark.parametrize("prefix", ["llm", "", None])
def test_a_prefix_that_is_no_path_is_refused(world: World, prefix: object) -> None:
    tree = json.loads(Path(world.file()).read_text())
    tree["applications"][0]["route_prefix"] = prefix
    done = world.run("validate", world.file(applications=tree["applications"]))
    assert done.exit_code == 2
    assert "applications[0].route_prefix: not a path" in done.stderr


def test_status_says_that_the_cluster_is_being_stopped(world: World) -> None:
    seen: list[str] = []

    def ask() -> None:
        done = world.run("status")
        assert done.exit_code == 1
        seen.append(done.stderr)

    world.launcher.on_stop = ask
    world.stop_when_noted(signal.SIGTERM)
    assert world.run("serve", world.file()).exit_code == 0
    (said,) = seen
    assert said.startswith("error: `tandem serve` (process ") and said.endswith("is stopping\n")
    assert world.note.read() is None
