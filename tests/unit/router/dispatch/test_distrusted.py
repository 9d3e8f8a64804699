"""Requests whose groups end as they compute wrongly."""

from __future__ import annotations

import asyncio

from router.dispatch.attempts import Attempt
from router.dispatch.journey import Journey
from router.dispatch.streams import RequestStream
from tests.unit.data_plane.fakes import request, run
from workers.types import error_chunk


def test_a_group_that_computes_wrongly_is_no_fault_of_its_requests() -> None:
    """However many do so; and one that has got nothing waits for another group as after a crash."""
    wanted = request("r", [5], 8)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        attempt = Attempt(
            wire_id=wanted.request_id,
            stream=RequestStream(wanted),
            links={},
            target=None,  # type: ignore[arg-type]  # not looked at
            taken=loop.create_future(),
            begun=loop.create_future(),
        )
        journey = Journey(wanted)
        for _ in range(5):
            assert journey.take(error_chunk(wanted.request_id, 0, "group_distrusted", "wrong")) is None
            journey.end_of_group(attempt)
            assert (journey.num_crashes, journey.num_suspicions, journey.is_suspect) == (0, 0, False)
            assert not journey.was_stopped and not journey.is_over
            assert journey.move() == wanted

    run(test())
