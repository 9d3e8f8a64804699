"""Words and ports of starting a cluster; the rest needs one (tests/integration)."""

from __future__ import annotations

import socket

import pytest

from cluster.launch import LaunchError, check_port, free_port, plain_message

SERVE_MESSAGE = """\
Deploying app 'tandem' failed with exception:
Traceback (most recent call last):
  File "x.py", line 1, in build
    raise ConfigError(problems)
KeyError: 'inner'

The above exception was the direct cause of the following exception:

\x1b[36mray::build()\x1b[39m (pid=1)
  File "y.py", line 2
cluster.problems.ConfigError: model.pth: unknown key
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
