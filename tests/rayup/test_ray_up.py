"""The shipped on-premise file, proven: `ray up`, groups across hosts, one host lost, `ray down`.

The tests are steps of one story and run in their order; the first that fails ends it.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.rayup.__main__ import CACHE
from tests.rayup.client import Client
from tests.rayup.hosts import Host, HostParts, start_network
from tests.rayup.operator import ROOT, Operator
from tests.rayup.tools import find_tools

pytestmark = [pytest.mark.rayup, pytest.mark.timeout(400, func_only=True)]

PORT = 8000
QUESTION = "The capital of France is"
STORIES = [f"Story number {i}. Once upon a time there was a" for i in range(6)]
# The machine is small and all hosts share it: little cache, one thread a rank.
SMALL = ["pools.unified.cache.num_blocks=600", "pools.unified.parallel.threads_per_rank=1"]


@dataclass(frozen=True)
class Site:
    """Everything that is there once `ray up` is done."""

    operator: Operator
    head: Host
    workers: tuple[Host, Host]
    client: Client

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.head, *self.workers)

    def deploy(self, file: str, *assignments: str) -> None:
        """`tandem deploy` on the head; returns when every group has answered."""
        options = "".join(f" --set {assignment}" for assignment in assignments)
        command = f"tandem deploy {file}{options} --timeout-s 150"
        # On a busy machine Serve ends its own ingress when that is slow to start, and starts another.
        self.operator.on_head(f"{command} || {command}", timeout_s=330)

    def ranks(self) -> list[int]:
        """How many rank processes each host has."""
        return [len(host.processes("ray::RankActor")) for host in self.hosts]


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Three hosts, and a cluster on them by `ray up`; at the end the hosts are gone."""
    folder = Path(tempfile.mkdtemp(prefix="rayup-"))
    hosts = [Host(number) for number in (1, 2, 3)]
    head, *workers = hosts
    tools = find_tools(CACHE)
    started = time.monotonic()
    start_network()
    operator = Operator(folder, tools)
    parts = HostParts(tools=tools, cache=CACHE.parent, public_key=operator.public_key)
    try:
        for host in hosts:
            host.start(parts, folder / f"{host.name}.log")
        operator.fill_in(head, workers)
        say(started, "three hosts with sshd")
        bring_up(operator, hosts, started)
        say(started, "all nodes are there")
        client = Client(f"http://{head.address}:{PORT}", operator.api_key)
        yield Site(operator, head, (workers[0], workers[1]), client)
        if request.session.testsfailed:
            keep_logs(hosts)
    finally:
        for host in hosts:
            host.kill()
        shutil.rmtree(folder)


def test_ranks_of_one_group_on_two_hosts(site: Site) -> None:
    """Every group has a rank on each worker: all-reduce goes from host to host."""
    spread = ["tensor_parallel=2", "placement=STRICT_SPREAD", "cpus_per_rank=1"]
    site.deploy(
        "~/tandem/deploy/cluster.yaml", *SMALL, *(f"pools.unified.{assignment}" for assignment in spread)
    )
    assert site.ranks() == [0, 2, 2]
    assert "Paris" in site.client.complete(QUESTION, 12)
    assert len(site.client.groups()) == 2
    with site.client.streams(STORIES, 16) as streams:
        pass
    assert [stream.error for stream in streams] == [""] * len(STORIES)
    again = [site.client.complete(story, 16) for story in STORIES]
    assert [stream.text for stream in streams] == again
    said = "".join(host.read_logs("worker-*") for host in site.workers)
    assert said.count("the ranks are on several machines: they add up over the network") >= 2


def test_outside_the_cluster_only_the_api_answers(site: Site) -> None:
    assert site.client.get("/v1/models", with_key=False).status_code == 401
    assert site.client.get("/v1/models").status_code == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((site.head.address, 8265), timeout=5).close()
    status = site.operator.on_head("RAY_AUTH_MODE=disabled ray status 2>&1 | tail -3", timeout_s=60)
    assert "Active" not in status


def test_prefill_on_one_host_and_decode_on_the_other(site: Site) -> None:
    """KV blocks go from host to host over sockets: no memory is shared."""
    tree = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())
    (app,) = tree["applications"]
    small = {"cache": {"num_blocks": 600}, "parallel": {"threads_per_rank": 1}}
    pool = {**app["args"]["pools"]["unified"], **small}
    app["args"]["pools"] = {"prefill": pool, "decode": pool}
    # Every prompt is worth reading, however short it is.
    app["args"]["router"]["placement"] = {"interference_weight": 1000.0, "transfer_ms": 0.0}
    router, _ = app["deployments"]
    app["deployments"] = [router, {"name": "prefill"}, {"name": "decode"}]
    site.head.write("two-pools.yaml", yaml.safe_dump(tree))
    site.operator.on_head("tandem down", timeout_s=90)
    site.deploy("~/two-pools.yaml")
    assert site.ranks() == [0, 1, 1]
    prompt = "One fine day in the garden. " * 40
    first = site.client.complete(prompt, 16)
    assert site.client.complete(prompt, 16) == first

    def transports() -> list[str]:
        return [reads["transport"] for group in site.client.groups() for reads in group["reads"]]

    assert wait_for(lambda: transports() == ["sockets"], 20), transports()


def test_a_lost_host_costs_a_pause_and_no_request(site: Site) -> None:
    site.operator.on_head("tandem down", timeout_s=90)
    site.deploy("~/tandem/deploy/cluster.yaml", *SMALL)
    assert site.ranks() == [0, 1, 1]
    with site.client.streams(STORIES, 200) as streams:
        pass
    assert [stream.error for stream in streams] == [""] * len(STORIES)
    expected = [stream.text for stream in streams]

    victim = site.workers[1]
    with site.client.streams(STORIES, 200) as streams:
        assert wait_for(lambda: all(len(stream.times_s) > 10 for stream in streams), 30)
        # Every group must be at work when one is lost; groups tell their load once a second.
        assert wait_for(lambda: min(group["running"] for group in site.client.groups()) > 0, 10)
        lost_at_s = time.monotonic()
        victim.kill()
        assert not victim.is_alive
    assert [stream.error for stream in streams] == [""] * len(STORIES)
    assert [stream.text for stream in streams] == expected
    assert all(stream.is_done and stream.finish_reason == "length" for stream in streams)
    moved = [stream for stream in streams if stream.longest_gap_s > 2.0]
    assert moved, "streams of the lost group pause until another one takes them"
    gaps = max(stream.longest_gap_s for stream in streams)
    print(f"  {len(moved)} of {len(streams)} streams moved, the longest pause was {gaps:.1f} s", flush=True)

    until_s = lost_at_s + 30.0
    num_requests = 0
    while time.monotonic() < until_s:
        assert "Paris" in site.client.complete(QUESTION, 12)
        num_requests += 1
    print(f"  {num_requests} requests in the time after, none failed", flush=True)


def test_down_leaves_no_process_on_the_hosts(site: Site) -> None:
    started = time.monotonic()
    site.operator.on_head("tandem down && serve shutdown --yes", timeout_s=180)
    site.operator.down(timeout_s=150)
    say(started, "ray down has returned")
    alive = [host for host in site.hosts if host.is_alive]
    assert alive == [site.head, site.workers[0]]
    site.operator.stop_ray(site.workers[0])
    is_gone = wait_for(lambda: not any(host.processes() for host in alive), 60)
    assert is_gone, f"still there: {[host.processes() for host in alive]}"
    say(started, "the hosts have nothing to do any more")


def bring_up(operator: Operator, hosts: list[Host], started: float) -> None:
    """`ray up` until all nodes are there: Ray gives one 30 s to start, and does not try again by itself."""
    for attempt in (1, 2, 3):
        try:
            operator.up(timeout_s=240)
        except AssertionError as error:
            problem = str(error)
            continue
        say(started, f"ray up has returned (attempt {attempt})")
        if wait_for(lambda: all(host.processes("raylet/raylet") for host in hosts), 90) and wait_for(
            lambda: num_nodes(operator) == len(hosts), 60
        ):
            return
        problem = hosts[0].read_logs("monitor*")[-4000:]
    pytest.fail(f"not all nodes came:\n{problem}")


def say(started: float, news: str) -> None:
    print(f"  {time.monotonic() - started:5.1f} s  {news}", flush=True)


def wait_for(condition: Callable[[], object], timeout_s: float) -> bool:
    """Whether the condition became true within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def num_nodes(operator: Operator) -> int:
    """Living nodes, as Ray counts them."""
    program = "import ray; ray.init(address='auto'); print('N', sum(n['Alive'] for n in ray.nodes()))"
    output = operator.on_head(f'python -c "{program}" 2>/dev/null', timeout_s=60)
    return int(output.rpartition("N ")[2].split()[0])


def keep_logs(hosts: list[Host]) -> None:
    """After a failure: the end of what the autoscaler and Serve say."""
    print(hosts[0].read_logs("monitor*")[-3000:], hosts[0].read_logs("serve/controller*")[-6000:], flush=True)
