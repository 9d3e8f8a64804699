"""Serve's words in ours."""

from __future__ import annotations

from cluster.running.plain import in_one_line, plain_message

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


def test_a_message_for_one_line_is_cut_and_may_be_none() -> None:
    assert in_one_line(SERVE_MESSAGE) == (
        "Deploying app 'tandem' failed with exception: ConfigError: model.pth: unknown key router.policy: "
        "not one of the choices"
    )
    assert (in_one_line(None), in_one_line("x\n\n y " * 200)) == ("", ("x y " * 200)[:300])
