"""Handing a deployment to Serve: its words in ours, and a dashboard that is slow; and taken ports."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from cluster.launch.errors import LaunchError, NotReadyInTime, TakenAway
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.ports import check_port, free_port, reserved_port
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.fakes import FakeServer


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"port {port} on 127.0.0.1 cannot be used: Address already in use"
        ):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", free_port())


def test_ports_of_version_6() -> None:
    try:
        port = free_port("::")
    except OSError:
        pytest.skip("this machine has no addresses of version 6")
    check_port("::", port)


def test_a_machine_without_version_6_is_told_which_port_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Version4(socket.socket):
        def __init__(self, family: int = socket.AF_INET) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family)

    monkeypatch.setattr(socket, "socket", Version4)
    with pytest.raises(LaunchError, match="port 8000 on :: cannot be used: Address family not supported"):
        check_port("::", 8000)


def test_a_port_is_promised_to_one_command_at_a_time_before_anything_listens() -> None:
    port = free_port()
    with reserved_port("127.0.0.1", port):
        check_port("127.0.0.1", port)
        with pytest.raises(LaunchError) as caught, reserved_port("0.0.0.0", port):
            pytest.fail("promised twice")
    assert str(caught.value) == (
        f"port {port} on 0.0.0.0 cannot be used: another tandem command that is starting has taken it; "
        "choose another port (--port N, or http_options.port in the file)"
    )
    with reserved_port("127.0.0.1", port):
        pass


def test_a_slow_dashboard_is_asked_again() -> None:
    news: list[str] = []
    with FakeServer().running() as server:

        def report(text: str) -> None:
            news.append(text)
            if text.endswith("asking again"):
                server.takes_puts.set()

        api = ServeApi(server.url, timeout_s=1.0)
        server.takes_puts.clear()
        deploy(api, {"applications": []}, report=report)
        slow = f"the Ray dashboard at {server.url} did not answer within 1 s"
        assert news == ["handing the deployment to Serve", f"{slow}; asking again"]
        assert server.puts == [{"applications": []}] * 2
        server.takes_puts.clear()
        with pytest.raises(LaunchError) as caught:
            deploy(api, {"applications": []}, timeout_s=0.0)
    assert str(caught.value) == f"Serve took no deployment in 0 s: {slow}"


class Clock:
    """Time passes at every look."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._step_s
        return self._now


@pytest.mark.parametrize("applications", [{}, {"tandem": {"status": "DELETING", "deployments": {}}}])
def test_an_application_that_is_taken_away_is_not_waited_for(applications: dict[str, Any]) -> None:
    """As by `tandem down` from another terminal. Serve may have looked at neither yet: some seconds are
    given."""
    news: list[str] = []
    with FakeServer().running() as server:
        server.details = {"applications": {"tandem": {"status": "DEPLOYING", "deployments": {}}}}

        def report(text: str) -> None:
            news.append(text)
            server.details = {"applications": applications}

        with pytest.raises(LaunchError) as caught:
            wait_ready(
                ServeApi(server.url),
                application="tandem",
                url=server.url,
                report=report,
                timeout_s=900.0,
                clock=Clock(4.0),
            )
    assert str(caught.value) == (
        "Serve runs no tandem any more: another command has taken it away, as `tandem down` does; "
        "deploy again"
    )
    assert news[0] == "building the application" and len(news) == 2


def test_a_cluster_that_has_gone_is_not_waited_for() -> None:
    api = ServeApi(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TakenAway, match=r"the cluster has been gone for 30 s: no Ray dashboard answers at "):
        wait_ready(api, application="tandem", url=api.url, timeout_s=900.0, clock=Clock(20.0))


def test_a_dashboard_that_answers_with_an_error_has_not_gone() -> None:
    with FakeServer().running() as server:
        server.answers_dashboard = False
        with pytest.raises(NotReadyInTime) as caught:
            wait_ready(
                ServeApi(server.url), application="tandem", url=server.url, timeout_s=90.0, clock=Clock(50.0)
            )
    said = f"not ready in time (--timeout-s); Serve says: UNKNOWN {server.url} answered 404"
    assert str(caught.value).startswith(said)


def test_why_a_group_does_not_come_is_said_while_it_is_waited_for() -> None:
    message = """\
A replica failed to start with exception. Retrying. Error:
\x1b[36mray::ServeReplica:tandem:unified.initialize()\x1b[39m (pid=7, ip=127.0.0.1)
  File "group.py", line 108, in __init__
workers.group.GroupFailure: the group did not start: no GPU is there
"""
    unified = {"target_num_replicas": 2, "replicas": [{"state": "RUNNING"}], "message": message}
    router = {"target_num_replicas": 1, "replicas": [{"state": "RUNNING"}], "message": "all is well"}
    app = {"status": "DEPLOYING", "deployments": {"unified": unified, "router": router}}
    news: list[str] = []
    with FakeServer().running() as server:
        server.details = {"applications": {"tandem": app}}
        with pytest.raises(LaunchError):
            wait_ready(
                ServeApi(server.url), application="tandem", url=server.url, report=news.append, timeout_s=0.0
            )
    assert news == [
        "unified 1/2 (A replica failed to start with exception. Retrying. Error: GroupFailure: the group did "
        "not start: no GPU is there), router 1/1"
    ]
