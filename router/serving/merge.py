"""The chunks of several requests as one sequence, for a list of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.dispatch.interface import Dispatcher
from router.tasks import end_tasks
from workers.types import GenerateRequest, TokenChunk

_MAX_AHEAD = 16  # chunks of a request that wait for the reader


async def merged(
    dispatcher: Dispatcher, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """(index of the request, chunk) as they come, until all have ended.

    The first exception of any request ends them all; so does closing the generator.
    """
    if len(requests) == 1:
        async with aclosing(dispatcher.generate(requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, TokenChunk | Exception | None]] = asyncio.Queue()
    # What a slow reader leaves untaken waits in the requests' own streams, which have a limit.
    room = [asyncio.Semaphore(_MAX_AHEAD) for _ in requests]

    async def pump(index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(dispatcher.generate(request)) as chunks:
                async for chunk in chunks:
                    await room[index].acquire()
                    queue.put_nowait((index, chunk))
        except Exception as error:  # raised again where the queue is read
            queue.put_nowait((index, error))
        else:
            queue.put_nowait((index, None))

    pumps = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    running = len(pumps)
    try:
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                room[index].release()
                yield index, item
    finally:
        await end_tasks(*pumps)
