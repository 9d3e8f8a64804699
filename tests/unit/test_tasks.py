"""Tasks that run for as long as their owner."""

from __future__ import annotations

import asyncio

import pytest

from workers.tasks import start_task


async def _fail() -> None:
    raise ArithmeticError("a bug")


async def _wait() -> None:
    await asyncio.sleep(60.0)


def test_an_error_is_said_when_it_happens_and_an_end_that_was_asked_for_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        failing, waiting = start_task(_fail(), "the heartbeat of g"), start_task(_wait(), "another")
        await asyncio.wait([failing])
        await asyncio.sleep(0)  # callbacks of a task come after it
        assert caplog.messages == ["the heartbeat of g ends: ArithmeticError('a bug')"]
        waiting.cancel()
        await asyncio.gather(failing, waiting, return_exceptions=True)

    asyncio.run(run())
    assert len(caplog.messages) == 1
