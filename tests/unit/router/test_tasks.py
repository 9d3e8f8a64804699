from __future__ import annotations

import asyncio

from router.tasks import end_tasks


def test_swallowed_cancellations_are_repeated() -> None:
    cancellations: list[int] = []

    async def stubborn() -> None:
        for attempt in range(3):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancellations.append(attempt)
                if attempt == 2:
                    raise

    async def fails() -> None:
        raise ValueError

    async def run() -> None:
        tasks = [asyncio.create_task(stubborn()), asyncio.create_task(fails())]
        await asyncio.sleep(0)
        await asyncio.wait_for(end_tasks(*tasks), 10)
        assert tasks[0].cancelled() and isinstance(tasks[1].exception(), ValueError)

    asyncio.run(run())
    assert cancellations == [0, 1, 2]
    asyncio.run(end_tasks())
