"""What the autoscaling benchmark sees while the cluster is busy, and what it makes of it."""

from __future__ import annotations

import asyncio
import random

import httpx

from benchmarks.autoscaling import Replay, turns_s


def test_a_router_that_does_not_answer_is_told_and_watched_on() -> None:
    answers: list[httpx.Response | httpx.HTTPError] = [
        httpx.ReadTimeout("too busy"),
        httpx.Response(503),
        httpx.Response(200, json={"groups": [{"ready": True}, {"ready": False}]}),
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        said = answers.pop(0)
        if isinstance(said, httpx.HTTPError):
            raise said
        return said

    decided = {"target": 2, "needed": 1.4, "reason": "grows", "terms": {"queue": 1.4, "memory": 0.0}}
    replay = Replay("http://router", lambda: decided, random.Random(0))

    async def told() -> list[str]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            watch = replay.watch(client, lambda at_s: 3.0, period_s=0.0)
            return [await anext(watch) for _ in range(3)]

    late, refused, seen = asyncio.run(told())
    assert "ReadTimeout" in late and "503" in refused
    assert "groups 2 wanted, 1 ready" in seen
    (line,) = replay.lines
    assert (line.rate, line.ready, line.target, line.terms) == (3.0, 1, 2, {"queue": 1.4})


def test_turns_are_where_the_direction_changes() -> None:
    sizes = [(0.0, 1), (5.0, 2), (10.0, 3), (15.0, 3), (20.0, 2), (25.0, 2), (30.0, 3)]
    assert turns_s(sizes) == [20.0, 30.0]
    assert turns_s(sizes[:4]) == []
