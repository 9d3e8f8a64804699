"""A completion over a connection of its own, as raw bytes: a client that costs next to nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any


async def complete(
    port: int, body: Mapping[str, Any], on_piece: Callable[[bytes], None], *, timeout_s: float
) -> None:
    """Asks 127.0.0.1 for a completion; `on_piece` gets what comes until the server closes, the head too.

    Raises TimeoutError when that takes longer than `timeout_s`.
    """
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + content)
            while piece := await reader.read(1 << 16):
                on_piece(piece)
        finally:
            writer.close()
