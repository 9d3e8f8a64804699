"""Handing a deployment to Serve: its words in ours, and a dashboard that is slow; and taken ports."""

from __future__ import annotations

import socket

import pytest

from cluster.launch.errors import LaunchError
from cluster.launch.handover import deploy, plain_message
from cluster.launch.ports import check_port, free_port, reserved_port
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.fakes import FakeServer

SERVE_MESSAGE = """\
Deploying app 'tandem' failed with exception:
Traceback (most recent call last):
  File "x.py", line 1, in build
    raise ConfigError(problems)
KeyError: 'inner'

The above exception was the direct cause of the following exception:

\x1b[36mray::build()\x1b[39m (pid=1)
  File "y.py", line 2
cluster.config.problems.ConfigError: model.pth: unknown key
router.policy: not one of the choices
"""


def test_a_trace_becomes_the_exception_that_ended_it() -> None:
    assert plain_message(SERVE_MESSAGE).splitlines() == [
        "Deploying app 'tandem' failed with exception:",
        "ConfigError: model.pth: unknown key",
        "router.policy: not one of the choices",
    ]
    assert plain_message("no replicas\ncan start") == "no replicas\ncan start"


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
