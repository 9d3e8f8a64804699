"""`tandem scale`: what it changes in a file, what it refuses, and what it deploys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.cli.scale import scale
from cluster.config.problems import ConfigError
from cluster.deployment.replicas import with_replicas
from cluster.launch.errors import LaunchError
from cluster.launch.news import Report
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.conftest import World
from tests.unit.cluster.fakes import FakeLauncher

FILE = """\
# Our cluster.
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
- name: tandem   # the only one
  import_path: cluster.app:build
  args: {{pools: {{prefill: {{}}, decode: {{}}}}}}
  deployments:
  - {{name: router,   num_replicas: 1}}  # one is enough
  - name: prefill
    num_replicas: 1  # was 2

  - {{ name: decode }}
"""
POOLS = {"prefill": 0, "decode": 0}


def test_the_number_changes_and_nothing_else() -> None:
    before = FILE.format(port=8000)
    assert with_replicas(before, {"prefill": 12}, pools=POOLS, file="f") == before.replace(
        "num_replicas: 1  # was 2", "num_replicas: 12  # was 2"
    )
    assert with_replicas(before, {"router": 3, "decode": 2}, pools=POOLS, file="f") == before.replace(
        "num_replicas: 1}", "num_replicas: 3}"
    ).replace("{ name: decode }", "{ name: decode, num_replicas: 2 }")
    without = before.replace("    num_replicas: 1  # was 2\n", "")
    added = without.replace("  - name: prefill\n", "  - name: prefill\n    num_replicas: 4\n")
    assert with_replicas(without, {"prefill": 4}, pools=POOLS, file="f") == added


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "  - name: decode  # answers\n  - name: b\n",
            "  - name: decode  # answers\n    num_replicas: 2\n  - name: b\n",
        ),
        ("  - name: decode  # answers", "  - name: decode  # answers\n    num_replicas: 2"),
        ("  - name: decode\r\n", "  - name: decode\r\n    num_replicas: 2\r\n"),
        (
            "  - name: decode\r\n    num_replicas: 1 # x\r\n",
            "  - name: decode\r\n    num_replicas: 2 # x\r\n",
        ),
    ],
)
def test_comments_and_ends_of_lines_stay_where_they_are(before: str, after: str) -> None:
    newline = "\r\n" if "\r" in before else "\n"
    head = "applications:\n- import_path: cluster.app:build\n  deployments:\n".replace("\n", newline)
    assert with_replicas(head + before, {"decode": 2}, pools=POOLS, file="f") == head + after


@pytest.mark.parametrize(
    ("old", "new", "name", "message"),
    [
        ("", "", "prefil", "prefil: no such pool; got 'prefil'; allowed: router, prefill, decode; did you"),
        ("  - { name: decode }\n", "", "decode", "decode: the file has no entry of this pool in deployments"),
        ("num_replicas: 1  # was 2", "autoscaling_config: {max_replicas: 3}", "prefill",
         "prefill: the pool is autoscaled; got 2; its bounds are autoscaling_config.min_replicas"),
        ("num_replicas: 1  # was 2", "num_replicas: &one 1\n    max_surge_percent: *one", "prefill",
         "f:deployments: num_replicas cannot be changed without changing something else"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_is_refused(old: str, new: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        text = FILE.format(port=8000).replace(old, new)
        with_replicas(text, {name: 2}, pools=POOLS, file="f")
    assert str(caught.value).startswith(message)


def write(world: World) -> Path:
    file = world.folder / "own.yaml"
    file.write_text(FILE.format(port=world.server.port))
    return file


def replicas(tree: dict) -> dict[str, int]:  # type: ignore[type-arg]
    return {entry["name"]: entry.get("num_replicas", 1) for entry in tree["applications"][0]["deployments"]}


def test_scale_edits_and_deploys_the_file_of_the_last_deploy_with_its_settings(world: World) -> None:
    file = write(world)
    dashboard = ("--dashboard", world.server.url)
    setting = ("--set", "router.policy=round_robin")
    assert world.run("deploy", str(file), *setting, *dashboard).exit_code == 0
    done = world.run("scale", "prefill=2", "--yes", *dashboard)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "-    num_replicas: 1  # was 2" in lines
    assert "+    num_replicas: 2  # was 2" in lines
    assert "with --set router.policy=round_robin" in lines
    assert file.read_text() == FILE.format(port=world.server.port).replace("1  # was 2", "2  # was 2")
    tree = world.launcher.configs[-1]
    assert replicas(tree) == {"router": 1, "prefill": 2, "decode": 1}
    assert tree["applications"][0]["args"]["router"] == {"policy": "round_robin"}
    assert [path.name for path in world.folder.glob(".own*")] == []
    for value in ("round_robin", "prefix"):  # what is said again stands there once
        done = world.run("scale", "prefill=3", "--dry-run", "--set", f"router.policy={value}", *dashboard)
        assert f"with --set router.policy={value}" in done.stdout.splitlines()


def test_a_link_to_the_file_and_its_ends_of_lines_survive(world: World) -> None:
    file = write(world)
    text = FILE.format(port=world.server.port).replace("\n", "\r\n").encode()
    file.write_bytes(text)
    link = world.folder / "link.yaml"
    link.symlink_to(file)
    done = world.run("scale", "prefill=2", str(link), "--yes", "--dashboard", world.server.url)
    assert done.exit_code == 0, done.stderr
    assert link.is_symlink()
    assert file.read_bytes() == text.replace(b"1  # was 2", b"2  # was 2")


def test_a_file_that_is_not_utf_8_is_left_alone(world: World) -> None:
    file = write(world)
    text = FILE.format(port=world.server.port).encode("utf-16")
    file.write_bytes(text)
    done = world.run("scale", "prefill=2", str(file), "--yes", "--dashboard", world.server.url)
    assert (done.exit_code, file.read_bytes()) == (1, text)
    assert f"{file} is not UTF-8; change num_replicas by hand" in done.stderr


def test_a_dry_run_shows_and_changes_nothing(world: World) -> None:
    file = write(world)
    before = file.read_text()
    done = world.run("scale", "decode=3", str(file), "--dry-run", "--dashboard", world.server.url)
    assert (done.exit_code, file.read_text()) == (0, before)
    assert "+  - { name: decode, num_replicas: 3 }" in done.stdout
    assert world.launcher.configs == []


def test_scale_to_what_is_there_says_so(world: World) -> None:
    file = write(world)
    done = world.run("scale", "prefill=1", str(file), "--yes", "--dashboard", world.server.url)
    assert (done.exit_code, world.launcher.configs) == (0, [])
    assert "says so already" in done.stdout


def test_what_scale_refuses(world: World) -> None:
    file = write(world)
    before = file.read_text()
    dashboard = ("--dashboard", world.server.url)
    for arguments, code, message in (
        (("prefil=2", str(file)), 2, "prefil: no such pool"),
        (("prefill=two", str(file)), 2, "command line:prefill: not a number of groups; got 'two'"),
        (("prefill=" + "9" * 5000, str(file)), 2, "command line:prefill: not a number of groups; got '999"),
        (("prefill=0", str(file)), 2, f"{file}:11:applications[0].deployments[1].num_replicas"),
        (("prefill=1", "prefill=2", str(file)), 2, "command line:prefill: the pool is given twice"),
        ((str(file),), 2, "command line: no pool is named"),
        (("prefill=2",), 1, "error: no file is known of what runs there"),
        (("prefill=2", "nosuch.yaml"), 1, "nosuch.yaml is not there"),
        (("prefill=2", str(file), "--dashboard", "http://127.0.0.1:1"), 1, "start one with `tandem serve`"),
    ):
        done = world.run("scale", *dashboard, "--yes", *arguments)
        assert (done.exit_code, file.read_text()) == (code, before), arguments
        assert message in done.stderr, arguments
    done = world.run("scale", "prefill=2", str(file), *dashboard)  # nobody at a terminal
    assert (done.exit_code, file.read_text()) == (1, before)
    assert "pass --yes" in done.stderr


def test_a_deployment_that_serve_does_not_take_leaves_the_file_as_it_was(world: World) -> None:
    file = write(world)
    before = file.read_text()
    world.server.details = {
        "applications": {"tandem": {"status": "RUNNING"}},
        "http_options": {"host": "127.0.0.1", "port": 1},
    }
    done = world.run("scale", "prefill=2", str(file), "--yes", "--dashboard", world.server.url)
    assert (done.exit_code, file.read_text()) == (2, before)
    assert "http_options.port: needs a new deployment" in done.stderr


class Editor(FakeLauncher):
    """Refuses every deployment, and somebody edits the file meanwhile."""

    file: Path

    def deploy(self, api: ServeApi, config: Mapping[str, Any], *, report: Report, timeout_s: float) -> None:
        self.file.write_text(self.file.read_text() + "# mine\n")
        raise LaunchError("refused")


def test_what_somebody_writes_meanwhile_is_not_taken_back(world: World) -> None:
    file = write(world)
    world.launcher = launcher = Editor(ServeApi(world.server.url), world.folder)
    launcher.file = file
    done = world.run("scale", "prefill=2", str(file), "--yes", "--dashboard", world.server.url)
    assert (done.exit_code, "refused" in done.stderr) == (1, True)
    assert f"{file} has been changed by someone else meanwhile, and is left as it is" in done.stderr
    assert file.read_text().endswith("# mine\n") and "num_replicas: 2  # was 2" in file.read_text()


def test_ctrl_c_at_the_question_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(world)
    before = file.read_text()
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setitem(vars(sys.modules[scale.__module__]), "sys", terminal)
    done = world.run("scale", "prefill=2", str(file), "--dashboard", world.server.url, input="")
    assert (done.exit_code, file.read_text(), world.launcher.configs) == (130, before, [])
    assert "Deploy this? [Y/n]:" in done.stderr and "Deploy this?" not in done.stdout
    assert done.stderr.endswith("\nerror: interrupted; nothing was changed\n")
