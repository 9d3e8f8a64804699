"""What the HTTP benchmarks take of a server, and what is made of the samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from benchmarks import paced
from benchmarks.http import NEW_TOKENS, Samples, row_of, stream

Given = TypeVar("Given")
EVENT = b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens":%d}}\n\n'


async def asked(pieces: list[bytes], ask: Callable[[int], Awaitable[Given]]) -> tuple[bytes, Given]:
    """What a server that answers so was sent, and what `ask` gave, which gets its port."""
    received = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        received.extend(head + await reader.readexactly(length))
        for piece in (b"HTTP/1.1 200 OK\r\n\r\n", *pieces):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        given = await ask(server.sockets[0].getsockname()[1])
    return bytes(received), given


def test_a_stream_counts_from_its_first_event_and_must_be_whole() -> None:
    pieces = [EVENT % NEW_TOKENS, b"data: [DONE]\n\n"]
    sent, first_s = asyncio.run(asked(pieces, lambda port: stream(port, [5, 6])))
    assert 0 < first_s < 5
    body = json.loads(sent.partition(b"\r\n\r\n")[2])
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ([5, 6], NEW_TOKENS, True)
    for short in ([EVENT % (NEW_TOKENS - 1), pieces[1]], pieces[:1]):
        with pytest.raises(RuntimeError, match=f"did not bring {NEW_TOKENS} tokens"):
            asyncio.run(asked(short, lambda port: stream(port, [5, 6])))


def test_a_paced_stream_tells_that_it_has_begun_and_must_end_well() -> None:
    async def ask(pieces: list[bytes]) -> bool:
        begun = asyncio.Event()
        await asked(pieces, lambda port: paced.stream(port, 3, begun))
        return begun.is_set()

    assert asyncio.run(ask([EVENT % 3, b"data: [DONE]\n\n"]))
    with pytest.raises(RuntimeError, match="did not end well"):
        asyncio.run(ask([EVENT % 3]))


def test_a_row_holds_medians_and_the_cost_of_a_token() -> None:
    samples = Samples(
        http=[80.0, 90.0, 100.0],
        engine=[100.0, 120.0, 90.0],
        first_event_s=[0.1, 0.2, 0.4],
        cpu_s={"router": 0.003, "HAProxy": 0.0015},
        tokens=30,
    )
    row = row_of(8, samples)
    assert (row["http_tokens_per_s"], row["engine_tokens_per_s"], row["share_of_engine"]) == (
        90.0,
        100.0,
        0.9,
    )
    assert (row["first_event_p50_ms"], row["first_event_p99_ms"]) == (200.0, 400.0)
    assert row["cpu_us_per_token"] == {"HAProxy": 50.0, "router": 100.0}
