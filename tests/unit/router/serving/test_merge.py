"""Chunks of several requests as one sequence: all of them, the first failure, and a reader who is slow."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from router.serving.merge import merged
from workers.types import GenerateRequest, RequestId, SamplingParams, TokenChunk


class Source:
    """A dispatcher whose requests bring `num_chunks` chunks without ever waiting."""

    def __init__(self, num_chunks: int, failing: str = "") -> None:
        self._num_chunks = num_chunks
        self._failing = failing
        self.made: Counter[str] = Counter()
        self.num_open = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.num_open += 1
        try:
            for number in range(self._num_chunks):
                if request.request_id == self._failing:
                    raise ConnectionError("the group is gone")
                self.made[request.request_id] += 1
                yield TokenChunk(request_id=request.request_id, choice=0, token_ids=(number,))
        finally:
            self.num_open -= 1


def requests(count: int) -> list[GenerateRequest]:
    sampling = SamplingParams(max_tokens=1)
    return [
        GenerateRequest(request_id=RequestId(str(index)), prompt_token_ids=(1,), sampling=sampling)
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_every_chunk_comes_once_and_in_order(count: int) -> None:
    async def test() -> None:
        source = Source(50)
        found: dict[int, list[int]] = {index: [] for index in range(count)}
        async for index, chunk in merged(source, requests(count)):
            assert chunk.request_id == str(index)
            found[index] += chunk.token_ids
        assert found == {index: list(range(50)) for index in range(count)}
        assert source.num_open == 0

    asyncio.run(asyncio.wait_for(test(), 10.0))


def test_the_first_failure_ends_all() -> None:
    async def test() -> None:
        source = Source(10**6, failing="1")
        with pytest.raises(ConnectionError, match="the group is gone"):
            async for _ in merged(source, requests(3)):
                pass
        assert source.num_open == 0

    asyncio.run(asyncio.wait_for(test(), 10.0))


def test_nothing_piles_up_before_a_slow_reader() -> None:
    async def test() -> None:
        source = Source(10**6)
        chunks = merged(source, requests(3))
        await anext(chunks)
        for _ in range(100):  # turns of the event loop in which nobody reads
            await asyncio.sleep(0)
        assert source.made == {"0": 18, "1": 17, "2": 17}  # one taken, 16 waiting, one in hand
        await chunks.aclose()
        assert source.num_open == 0

    asyncio.run(asyncio.wait_for(test(), 10.0))
