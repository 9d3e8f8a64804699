"""`tandem status`: one table out of what Serve, the directory and the router know."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from typing import Any

from cluster.running.group_table import ReportedLoad, application_statuses, parse_loads
from cluster.running.serve_api import ingress_url
from tests.unit.cluster.conftest import World
from tests.unit.cluster.fakes import LOAD
from workers.directory.groups import GroupEntry, GroupListing, GroupPhase
from workers.types import GroupId, Role


def replica(replica_id: str, state: str = "RUNNING", **more: Any) -> dict[str, Any]:
    return {
        "replica_id": replica_id,
        "state": state,
        "pid": 11,
        "node_ip": "10.0.0.1",
        "start_time_s": 1000.0,
        **more,
    }


def entry(replica_id: str, phase: GroupPhase = GroupPhase.READY, reason: str = "") -> GroupEntry:
    return GroupEntry(
        group_id=GroupId(f"unified-{replica_id}"),
        replica_id=replica_id,
        pool="unified",
        role=Role.UNIFIED,
        epoch=1,
        phase=phase,
        reason=reason,
        rank_pids=(21, 22),
        restarts=1,
    )


def details(unified: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    deployments = {
        "router": {"target_num_replicas": 1, "replicas": [replica("r1")]},
        "unified": {"target_num_replicas": 2, "replicas": unified, **more},
    }
    return {"applications": {"tandem": {"status": "RUNNING", "deployments": deployments}}}


def test_a_ready_group_has_its_ranks_and_its_load() -> None:
    loads = parse_loads(LOAD)
    assert loads == {
        "unified-u1": ReportedLoad(running=3, waiting=2, free_blocks=50, cached_blocks=25, active_blocks=25)
    }
    found = details([replica("u1"), replica("u2")])
    (status,) = application_statuses(found, listing(entry("u1"), entry("u2")), loads, now=1060.0)
    assert (status.desired, status.ready) == (3, 3)
    router, first, second = status.rows
    assert (router.group, router.role, router.state, router.front_pid) == ("r1", "router", "ready", 11)
    assert (first.group, first.role, first.rank_pids) == ("unified-u1", "unified", (21, 22))
    assert (first.running, first.waiting, first.kv_percent, first.age_s) == (3, 2, 25.0, 60.0)
    assert (first.restarts, router.restarts) == (1, None)
    assert (second.running, second.kv_percent, second.reason) == (None, None, "")


def listing(*entries: GroupEntry) -> dict[str, GroupListing]:
    return {"tandem": GroupListing(directory_id="d", version=1, entries=entries)}


def test_what_is_not_ready_says_why() -> None:
    found = details(
        [replica("u1"), replica("u2", "PENDING_INITIALIZATION"), replica("u3", "STOPPING")],
        message="",
    )
    entries = listing(
        entry("u1", GroupPhase.FAILED, "rank 1 was killed"),
        entry("u2", GroupPhase.LOADING, "loading the model"),
    )
    (status,) = application_statuses(found, entries, {}, now=1000.0)
    assert [(row.state, row.reason) for row in status.rows[1:]] == [
        ("failed", "rank 1 was killed"),
        ("loading", "loading the model"),
        ("draining", ""),
    ]
    assert status.ready == 1


def test_a_group_that_waits_for_room_and_one_that_has_not_started() -> None:
    found = details([replica("u1", "PENDING_ALLOCATION", pid=None, node_ip=None, start_time_s=None)])
    (status,) = application_statuses(found, {}, {}, now=1000.0)
    waiting, absent = status.rows[1:]
    assert (waiting.state, waiting.reason) == ("starting", "waiting for free CPUs or GPUs in the Ray cluster")
    assert (waiting.node, waiting.age_s) == ("", None)
    assert (absent.group, absent.state, absent.reason) == ("unified #2", "starting", "not started yet")


def test_the_table_and_the_exit_code(world: World) -> None:
    world.server.details = details([replica("u1"), replica("u2", "PENDING_INITIALIZATION")])
    world.server.details["http_options"] = {"host": "127.0.0.1", "port": world.server.port}
    world.entries = [entry("u1")]
    done = world.run("status", "--dashboard", world.server.url)
    assert done.exit_code == 1  # not all is ready
    title, header, *rows = done.stdout.splitlines()
    assert title == "tandem: RUNNING, 2 of 3 ready"
    assert header.split() == [
        *("group", "role", "state", "node", "ranks", "running", "waiting", "KV", "restarts", "age", "why")
    ]
    assert rows[1].split()[:9] == ["unified-u1", "unified", "ready", "10.0.0.1", "21", "22", "3", "2", "25"]
    assert rows[2].rstrip().endswith("ranks start and read weights")
    world.server.details = details([replica("u1"), replica("u2")])
    assert world.run("status", "--dashboard", world.server.url).exit_code == 0


def test_after_a_refused_deployment_what_still_answers_is_shown_with_the_reason(world: World) -> None:
    message = "Deploying app 'tandem' failed with exception:\nTraceback (most recent call last):\n  File x\n"
    message += "cluster.config.problems.ConfigError: pools.unified: needs a GPU\n"
    app = {"status": "DEPLOY_FAILED", "message": message, "deployments": {}}
    world.server.details = {
        "applications": {"tandem": app},
        "http_options": {"host": "127.0.0.1", "port": world.server.port},
    }
    world.entries = [entry("u1"), entry("u2", GroupPhase.LOADING, "loading the model")]
    done = world.run("status", "--dashboard", world.server.url)
    assert done.exit_code == 1
    title, reason, _, router, first, second = done.stdout.splitlines()
    assert title == "tandem: DEPLOY_FAILED, 2 of 3 ready"
    assert reason == (
        "  Deploying app 'tandem' failed with exception: ConfigError: pools.unified: needs a GPU"
    )
    assert router.split() == ["router", "router", "ready", "of", "the", "deployment", "before"]
    assert first.split()[:7] == ["unified-u1", "unified", "ready", "21", "22", "3", "2"]
    assert first.rstrip().endswith("of the deployment before")
    assert second.rstrip().endswith("loading the model")
    world.entries = []
    world.server.load = {}
    done = world.run("status", "--dashboard", world.server.url)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "tandem: DEPLOY_FAILED, 0 of 0 ready")


def test_the_cause_of_a_failed_start_is_in_the_table() -> None:
    message = "A replica failed to start with exception. Retrying. Error:\n\x1b[36mray::S.init()\x1b[39m\n"
    message += "workers.group.GroupFailure: the group did not start: no room"
    (status,) = application_statuses(details([], message=message), {}, {}, now=0.0)
    assert status.rows[-1].reason == (
        "A replica failed to start with exception. Retrying. Error: GroupFailure: the group did not start: "
        "no room"
    )


def test_the_last_decision_of_autoscaling_is_shown_with_its_terms(world: World) -> None:
    world.server.details = details([replica("u1")])
    world.entries = [entry("u1")]
    terms = {"queue": 1.5, "arrivals": 0.25, "decode": 0.0}
    pool = {"before": 1, "target": 2, "needed": 1.75, "reason": "up", "terms": terms}
    world.scaling = json.dumps({"slowness": 1.1, "pools": {"unified": pool}})
    shown = world.run("status", "--dashboard", world.server.url).stdout
    assert "  unified is to have 2: up; the load asks for 1.75 (queue 1.5, arrivals 0.25)" in shown
    found = json.loads(world.run("status", "--json", "--dashboard", world.server.url).stdout)
    assert found["applications"][0]["scaling"]["pools"]["unified"] == pool


def test_pools_and_who_reads_from_whom(world: World) -> None:
    deployments = {
        "router": {"target_num_replicas": 0, "replicas": []},
        "prefill": {"target_num_replicas": 1, "replicas": [replica("p1")]},
        "decode": {"target_num_replicas": 1, "replicas": [replica("d1")]},
    }
    world.server.details = {"applications": {"tandem": {"status": "RUNNING", "deployments": deployments}}}
    world.server.details["http_options"] = {"host": "127.0.0.1", "port": world.server.port}
    world.entries = [
        replace(entry(name), group_id=GroupId(f"{role.value}-{name}"), pool=role.value, role=role)
        for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE))
    ]
    prefill = said("prefill-p1", "prefill", leases=2)
    reads = {"source": "prefill-p1", "transport": "memory", "open": 1, "done": 7, "failed": 2}
    decode = said("decode-d1", "decode", reads=[reads | {"bytes": 50_000_000, "seconds": 0.2}])
    world.server.load = {"groups": [prefill, decode]}
    lines = world.run("status", "--dashboard", world.server.url).stdout.splitlines()
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["prefill-p1", "prefill", "ready"],
        ["decode-d1", "decode", "ready"],
    ]
    assert lines[4:] == [
        "  decode-d1 reads from prefill-p1 by memory: 7 done, 1 under way, 2 failed, 50.0 MB at 250 MB/s",
        "  prefill-p1 lends KV blocks: 2 leases held",
    ]
    done = world.run("status", "--dashboard", world.server.url, "--json")
    (application,) = json.loads(done.stdout)["applications"]
    assert application["pairs"] == [
        {
            "source": "prefill-p1",
            "reader": "decode-d1",
            "transport": "memory",
            "num_open": 1,
            "num_done": 7,
            "num_failed": 2,
            "num_bytes": 50_000_000,
            "bytes_per_s": 2.5e8,
        }
    ]
    assert [row["leases"] for row in application["rows"]] == [2, 0]
    # One that has just been asked, of a group that has left; and a group that takes no part.
    reads = {"source": "prefill-p0", "transport": "", "open": 1, "done": 0, "failed": 0}
    nothing = reads | {"source": "prefill-p1", "bytes": 0, "seconds": 0.0}
    decode = said("decode-d1", "decode", reads=[reads | {"bytes": 0, "seconds": 0.0}, nothing])
    problem = "rank 0 gives out no blocks: [Errno 98] Address already in use"
    world.server.load = {"groups": [said("prefill-p1", "prefill", exchange_problem=problem), decode]}
    lines = world.run("status", "--dashboard", world.server.url).stdout.splitlines()
    assert lines[4:] == [
        "  decode-d1 reads from prefill-p1: 0 done, 1 under way",
        f"  prefill-p1 exchanges no KV blocks: {problem}",
    ]


def test_every_application_is_asked_for_its_load(world: World) -> None:
    first, second = details([replica("u1")]), details([replica("u2")])
    (other,) = second["applications"].values()
    world.server.details = {
        "http_options": {"host": "127.0.0.1", "port": world.server.port},
        "applications": {
            **first["applications"],
            "other": {**other, "route_prefix": "/other"},
            "theirs": {"status": "RUNNING", "deployments": {"App": {}}, "route_prefix": "/theirs"},
        },
    }
    world.entries = [entry("u1"), entry("u2")]
    world.server.other_loads = {"/other/load": {"groups": [said("unified-u2", "unified", running=7)]}}
    shown = json.loads(world.run("status", "--json", "--dashboard", world.server.url).stdout)
    running = {row["group"]: row["running"] for app in shown["applications"] for row in app["rows"]}
    assert (running["unified-u1"], running["unified-u2"]) == (3, 7)


def test_watching_ends_by_ctrl_c_without_complaint(world: World) -> None:
    world.server.details = details([replica("u1", "PENDING_INITIALIZATION")])
    world.server.details["http_options"] = {"host": "127.0.0.1", "port": world.server.port}
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    done = world.run("status", "--watch", "--dashboard", world.server.url)
    interrupt.join()
    assert (done.exit_code, done.stderr) == (0, "")
    assert "tandem: RUNNING, 1 of 3 ready" in done.stdout


def said(group: str, role: str, **more: Any) -> dict[str, Any]:
    """What a router says of a group."""
    return {**LOAD["groups"][0], "group": group, "role": role, **more}


def test_a_router_of_another_version_or_that_is_none_does_no_harm(world: World) -> None:
    world.server.details = details([replica("u1"), replica("u2")])
    world.server.details["http_options"] = {"host": "127.0.0.1", "port": world.server.port}
    world.entries = [entry("u1"), entry("u2")]
    new = ("exchanges_kv", "exchange_problem", "leases", "transferring_blocks", "reads")
    earlier = {key: value for key, value in LOAD["groups"][0].items() if key not in new}
    world.server.load = {"groups": [earlier]}
    done = world.run("status", "--dashboard", world.server.url, "--json")
    (application,) = json.loads(done.stdout)["applications"]
    assert (application["rows"][1]["running"], application["rows"][1]["leases"]) == (3, 0)
    loads: list[Any] = [[], {"groups": 1}, {"groups": [{"group": "u1", "ready": True}]}, {"groups": [None]}]
    for world.server.load in loads:
        done = world.run("status", "--dashboard", world.server.url)
        line = "tandem: its /load says nothing that this command can read: no loads are shown\n"
        assert (done.exit_code, done.stderr) == (0, line if world.server.load else ""), world.server.load


def test_json_has_the_same(world: World) -> None:
    world.server.details = details([replica("u1"), replica("u2")])
    world.server.details["http_options"] = {"host": "127.0.0.1", "port": world.server.port}
    world.entries = [entry("u1"), entry("u2")]
    done = world.run("status", "--dashboard", world.server.url, "--json")
    assert done.exit_code == 0
    (application,) = json.loads(done.stdout)["applications"]
    assert (application["name"], application["ready"], application["desired"]) == ("tandem", 3, 3)
    assert application["rows"][1]["rank_pids"] == [21, 22]
    assert application["rows"][1]["kv_percent"] == 25.0


def test_hosts_of_all_interfaces_and_of_version_6_are_asked_from_here(world: World) -> None:
    assert ingress_url("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert ingress_url("::", 8000) == "http://[::1]:8000"
    assert ingress_url("example.org", 80) == "http://example.org:80"
    world.server.details = details([replica("u1"), replica("u2")])
    world.server.details["http_options"] = {"host": "::", "port": 1}  # where no router answers
    done = world.run("status", "--dashboard", world.server.url)
    assert done.exit_code == 0  # it may be reachable from elsewhere
    assert done.stderr.startswith("http://[::1]:1 does not answer (")
    assert done.stderr.endswith("): no loads are shown\n")


def test_nothing_deployed_and_nothing_there(world: World) -> None:
    done = world.run("status", "--dashboard", world.server.url)
    assert done.exit_code == 1
    assert done.stdout == f"nothing is deployed on {world.server.url}; start with `tandem deploy FILE`\n"
    done = world.run("status", "--dashboard", "http://127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no Ray dashboard answers at http://127.0.0.1:1")


def test_what_holds_a_group_up(world: World) -> None:
    world.server.details = details([replica("u1")])
    world.server.details["http_options"] = {"host": "127.0.0.1", "port": world.server.port}
    world.entries = [entry("u1")]
    (group,) = world.server.load["groups"]
    usage = {"bound": "bandwidth", "busy": 0.9, "compute": 0.052, "bandwidth": 0.83}
    world.server.load = {"groups": [{**group, "usage": usage}]}
    asked = ("status", "--dashboard", world.server.url)
    line = "  unified-u1 is bandwidth-bound: 5% of the arithmetic and 83% of the memory bandwidth"
    assert f"{line} of its machine, 90% of the time" in world.run(*asked).stdout.splitlines()
    rows = json.loads(world.run(*asked, "--json").stdout)["applications"][0]["rows"]
    assert [row["usage"] for row in rows] == [None, usage, None]
    world.server.load = {"groups": [{**group, "usage": {**usage, "bound": "idle"}}]}
    assert "bound" not in world.run(*asked).stdout
