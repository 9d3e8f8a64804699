"""What a router knows of the groups that Serve starts."""

from __future__ import annotations

import asyncio
import threading

from ray.serve.exceptions import RayServeException

from router.starting_groups import ReplicaStates, StartingGroups
from tests.unit.data_plane.fakes import run, until
from tests.unit.directory.entries import FakeClock


class Controller:
    """Answers when it is let, with what it is told."""

    def __init__(self, states: ReplicaStates) -> None:
        self.states = states
        self.answers = threading.Event()
        self.error: Exception | None = None
        self.num_answered = 0

    def __call__(self, application: str) -> ReplicaStates:
        assert application == "tandem"
        assert self.answers.wait(5.0)
        self.num_answered += 1
        if self.error is not None:
            raise self.error
        return self.states


def test_a_pool_that_answers_is_being_started_as_long_as_serve_says_so() -> None:
    async def test() -> None:
        clock = FakeClock()
        serve = Controller({"decode": {"STARTING": 1}})
        starting = StartingGroups("tandem", states=serve, clock=clock)
        assert starting() and starting()  # nobody knows yet
        serve.answers.set()
        for number, (states, expected) in enumerate(
            (
                ({"unified": {"STOPPING": 1}, "decode": {"STARTING": 1}, "prefill": {"RUNNING": 1}}, True),
                ({"unified": {"STOPPING": 1}, "prefill": {"STARTING": 1}, "router": {"STARTING": 1}}, False),
                ({"unified": {"RUNNING": 1, "UPDATING": 1}}, True),
                ({"decode": {"RUNNING": 2}}, False),
                ({}, False),
            )
        ):
            serve.states = states
            clock.now += 1.0
            starting()  # asks
            await until(lambda: serve.num_answered > number)  # noqa: B023
            await asyncio.sleep(0.05)
            assert [starting(), starting()] == [expected] * 2
        assert serve.num_answered == 5  # once a second by that clock, however often it was asked itself
        await starting.stop()

    run(test())


def test_a_controller_that_is_away_is_waited_for_three_seconds() -> None:
    async def test() -> None:
        clock = FakeClock()
        serve = Controller({"unified": {"STARTING": 1}})
        starting = StartingGroups("tandem", states=serve, clock=clock)
        assert starting()
        clock.now += 2.9
        assert starting()
        clock.now += 0.2
        assert not starting()
        await asyncio.sleep(0.05)
        serve.error = RayServeException("no controller")
        serve.answers.set()
        await until(lambda: serve.num_answered == 1)
        await asyncio.sleep(0.05)
        assert not starting()
        await starting.stop()

    run(test())


def test_after_any_error_the_next_question_waits_its_time() -> None:
    async def test() -> None:
        clock = FakeClock()
        serve = Controller({"unified": {"STARTING": 1}})
        serve.error = KeyError("a status of another version")
        serve.answers.set()
        starting = StartingGroups("tandem", states=serve, clock=clock)
        for _ in range(3):
            starting()
            await until(lambda: serve.num_answered == 1)
            await asyncio.sleep(0.05)
        assert serve.num_answered == 1
        assert not starting()
        await starting.stop()

    run(test())
