"""`tandem deploy` of other pools than those that run: both in between, where that is possible."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.launch.errors import LaunchError, NotReadyInTime, TakenAway
from cluster.launch.news import Report
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.conftest import World
from tests.unit.cluster.fakes import FakeLauncher

BOTH = {"prefill": {}, "decode": {"tensor_parallel": 2}}
SURGE = {"max_surge_percent": 50}
ENTRIES = [{"name": "prefill", "num_replicas": 1}, {"name": "decode", "num_replicas": 3}]
UNIFIED = {"name": "unified", "num_replicas": 1, **SURGE}


def runs(world: World, pools: dict[str, Any], *entries: dict[str, Any], **groups: int) -> None:
    """The application as Serve tells of it."""
    sent = {"name": "tandem", "args": {"pools": pools}, "deployments": list(entries)}
    running = {"state": "RUNNING"}
    world.server.details = {
        "applications": {
            "tandem": {
                "status": "RUNNING",
                "deployed_app_config": sent,
                "deployments": {
                    name: {"target_num_replicas": number, "replicas": [running] * number}
                    for name, number in groups.items()
                },
            }
        }
    }


def application(pools: dict[str, Any], entries: Sequence[dict[str, Any]] = ENTRIES) -> dict[str, Any]:
    """What is deployed."""
    return {
        "name": "tandem",
        "import_path": "cluster.app:build",
        "args": {"model": {"path": "embedded"}, "pools": pools},
        "deployments": [entry for entry in entries if entry["name"] in pools],
    }


def deployed(world: World, pools: dict[str, Any], *options: str) -> list[dict[str, Any]]:
    """The application as it is sent to Serve, once or twice."""
    file = world.file(applications=[application(pools, [*ENTRIES, UNIFIED])])
    done = world.run("deploy", file, "--dashboard", world.server.url, *options)
    assert done.exit_code == 0, done.stderr
    return [config["applications"][0] for config in world.launcher.configs]


def test_the_old_pool_stays_until_the_new_ones_answer(world: World) -> None:
    old = {"cpus_per_rank": 0.5}
    entry = {"name": "unified", "autoscaling_config": {"min_replicas": 1, "max_replicas": 4}, **SURGE}
    runs(world, {"unified": old}, entry, unified=2)
    between, last = deployed(world, BOTH)
    assert between["args"]["pools"] == {**BOTH, "unified": old}
    assert between["deployments"] == [*ENTRIES, {"name": "unified", "num_replicas": 2, **SURGE}]
    assert (last["args"]["pools"], last["deployments"]) == (BOTH, ENTRIES)
    ready = f"wait_ready tandem {world.server.url}"
    assert world.launcher.calls == ["deploy", ready, "deploy", ready]


def test_deployed_again_after_an_interruption_it_goes_on(world: World) -> None:
    entry = {"name": "unified", "num_replicas": 1, **SURGE}
    runs(world, BOTH | {"unified": {}}, *ENTRIES, entry, unified=1)
    starting = {"target_num_replicas": 1, "replicas": [{"state": "STARTING"}]}
    world.server.details["applications"]["tandem"]["deployments"]["decode"] = starting
    between, last = deployed(world, BOTH)
    assert between["deployments"] == [*ENTRIES, entry]
    assert last["deployments"] == ENTRIES


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (NotReadyInTime("not ready in time"), "; where there is no room for it, its"),
        (LaunchError("deployment failed: x"), ""),
    ],
)
def test_new_pools_that_do_not_come_up_leave_the_old_one(
    world: World, failure: LaunchError, hint: str
) -> None:
    runs(world, {"unified": {}}, {"name": "unified", **SURGE}, unified=1)
    world.launcher.failure = failure
    file = world.file(applications=[application(BOTH)])
    done = world.run("deploy", file, "--dashboard", world.server.url)
    assert done.exit_code == 1
    assert f"\nerror: {failure}; the old pool goes on answering{hint}" in done.stderr
    assert ("--no-wait ends it first" in done.stderr) == bool(hint)
    (config,) = world.launcher.configs
    assert set(config["applications"][0]["args"]["pools"]) == {"unified", "prefill", "decode"}


def test_each_step_has_the_whole_time(world: World) -> None:
    runs(world, {"unified": {}}, {"name": "unified", **SURGE}, unified=1)
    world.launcher.on_ready = lambda: time.sleep(0.5)
    deployed(world, BOTH, "--timeout-s", "60")
    assert [round(timeout_s) for timeout_s in world.launcher.timeouts_s] == [60, 60]
    assert world.launcher.timeouts_s[1] > 59.6


class SecondStepLauncher(FakeLauncher):
    """Serve is asked for the second step, and `failure` comes."""

    def __init__(self, api: ServeApi, folder: Path, failure: BaseException) -> None:
        super().__init__(api, folder)
        self._second = failure

    def deploy(self, api: ServeApi, config: Mapping[str, Any], *, report: Report, timeout_s: float) -> None:
        super().deploy(api, config, report=report, timeout_s=timeout_s)
        if len(self.configs) == 2:
            raise self._second


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (
            LaunchError("Serve took no deployment: x"),
            1,
            "Serve took no deployment: x; the old pool stays beside the new ones until this is deployed "
            "again",
        ),
        (KeyboardInterrupt(), 130, "interrupted; Serve may have taken it; see `tandem status`"),
    ],
)
def test_a_second_step_that_fails_says_what_holds_now(
    world: World, failure: BaseException, code: int, said: str
) -> None:
    runs(world, {"unified": {}}, {"name": "unified", **SURGE}, unified=1)
    world.launcher = SecondStepLauncher(ServeApi(world.server.url), world.folder, failure)
    done = world.run("deploy", world.file(applications=[application(BOTH)]), "--dashboard", world.server.url)
    assert done.exit_code == code
    assert done.stderr.endswith(f"\nerror: {said}\n")


def test_pools_that_are_taken_away_meanwhile_are_not_said_to_stay(world: World) -> None:
    def take_away() -> None:
        raise TakenAway("another command has taken it away")

    runs(world, {"unified": {}}, {"name": "unified", **SURGE}, unified=1)
    world.launcher.on_ready = take_away
    done = world.run("deploy", world.file(applications=[application(BOTH)]), "--dashboard", world.server.url)
    assert done.exit_code == 1
    assert done.stderr.endswith("\nerror: another command has taken it away\n")


def test_of_pools_that_go_the_one_that_answers_stays(world: World) -> None:
    runs(world, BOTH, *({**entry, **SURGE} for entry in ENTRIES), prefill=1, decode=3)
    between, last = deployed(world, {"unified": {}})
    assert between["args"]["pools"] == {"unified": {}, "decode": BOTH["decode"]}
    assert between["deployments"] == [UNIFIED, {"name": "decode", "num_replicas": 3, **SURGE}]
    assert last["deployments"] == [UNIFIED]


@pytest.mark.parametrize(
    ("pools", "entry", "groups", "decode", "option", "why"),
    [
        ({"unified": {}}, {}, 1, 3, "--wait", "unified, which runs, has no max_surge_percent"),
        ({"unified": {}}, SURGE, 1, 1, "--wait", "decode has neither max_surge_percent nor a second group"),
        ({"unified": {"cache": {"block_size": 32}}}, SURGE, 1, 3, "--wait", "block_size"),
        ({"unified": {}}, SURGE, 0, 3, "--wait", None),  # scaled to zero: nobody answers now
        ({"decode": {}}, SURGE, 1, 3, "--wait", None),  # Serve itself replaces those
        ({"unified": {}}, SURGE, 1, 3, "--no-wait", None),
    ],
)
def test_where_nothing_can_be_in_between_the_new_pools_come_at_once(
    world: World,
    pools: dict[str, Any],
    entry: dict[str, Any],
    groups: int,
    decode: int,
    option: str,
    why: str | None,
) -> None:
    (name,) = pools
    runs(world, pools, {"name": name, **entry}, **{name: groups})
    entries = [ENTRIES[0], {"name": "decode", "num_replicas": decode}]
    file = world.file(applications=[application(BOTH, entries)])
    done = world.run("deploy", file, "--dashboard", world.server.url, option)
    assert done.exit_code == 0, done.stderr
    (only,) = [config["applications"][0] for config in world.launcher.configs]
    assert (only["args"]["pools"], only["deployments"]) == (BOTH, entries)
    said = [line for line in done.stderr.splitlines() if line.endswith("): requests will wait")]
    assert len(said) == (why is not None)
    assert why is None or ("old and new pools cannot stand together (" in said[0] and why in said[0])


def test_an_old_pool_that_does_not_fit_the_new_model_is_not_started_with_it(
    world: World, tiny_model: Path
) -> None:
    runs(world, {"unified": {"tensor_parallel": 3}}, {"name": "unified", **SURGE}, unified=1)
    app = application(BOTH)
    app["args"]["model"]["path"] = str(tiny_model)
    done = world.run("deploy", world.file(applications=[app]), "--dashboard", world.server.url)
    assert (done.exit_code, len(world.launcher.configs)) == (0, 1), done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.endswith("): requests will wait")]
    assert "old and new pools cannot stand together (" in said and "pools.unified.tensor_parallel" in said


def test_a_single_new_group_that_is_replaced_by_surge_has_one_in_between(world: World) -> None:
    runs(world, {"unified": {}}, {"name": "unified", **SURGE}, unified=1)
    entries = [ENTRIES[0], {"name": "decode", "num_replicas": 1, **SURGE}]
    file = world.file(applications=[application(BOTH, entries)])
    done = world.run("deploy", file, "--dashboard", world.server.url)
    assert (done.exit_code, len(world.launcher.configs)) == (0, 2)
