"""One streaming completion of token ids over HTTP, and when each piece of it came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from cluster.replies import from_json

_DONE = b"[DONE]"
_MAX_ERROR_BYTES = 300
_MAX_BODY_BYTES = 16 << 20  # of what is no stream


class ServerUnusable(RuntimeError):
    """The server cannot be measured as it is. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a server says of its model."""

    name: str
    max_model_len: int | None  # tokens of prompt and answer together; None: it does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back. Times are those of the clock that was passed."""

    token_s: tuple[float, ...] = ()  # when pieces with text came, and the first whatever it held
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class CompletionClient:
    """Connections to one server. Use as a context inside of a running loop."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str], timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """url: of the service, without `/v1`. timeout_s: for a whole answer."""
        self._url = url.rstrip("/")
        self._headers = dict(headers)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(10.0, timeout_s))
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CompletionClient:
        # As many connections as requests are under way: a limit would hold requests back unseen.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=self._headers, timeout=self._timeout
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def model(self) -> ServedModel:
        """The first that the server lists. Raises ServerUnusable."""
        try:
            async with self._open().get(f"{self._url}/v1/models", allow_redirects=False) as response:
                body = await _body(response)
                if response.status != 200:
                    text = body.decode(errors="replace")[:_MAX_ERROR_BYTES]
                    raise ServerUnusable(f"{self._url}/v1/models answers {response.status}: {text}")
                listed: Any = from_json(body)
            first = listed["data"][0]
            longest = first.get("max_model_len")
            if longest is not None and (type(longest) is not int or longest < 1):
                raise ValueError(f"max_model_len is {longest!r}")
            return ServedModel(name=str(first["id"]), max_model_len=longest)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnusable(f"{self._url} does not answer: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerUnusable(f"{self._url}/v1/models is not what OpenAI servers answer") from error

    async def complete(self, body: bytes) -> Answer:
        """The answer to a body of `completion_body`; a failure is an Answer with an error, never raised."""
        token_s: list[float] = []
        usage: Mapping[str, Any] = {}
        is_done = False
        try:
            headers = {"content-type": "application/json"}
            async with self._open().post(
                f"{self._url}/v1/completions", data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    text = (await _body(response)).decode(errors="replace")[:_MAX_ERROR_BYTES]
                    return Answer(error=f"status {response.status}: {text}", end_s=self._clock())
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    now, data = self._clock(), line[5:].strip()
                    if data == _DONE:
                        is_done = True
                        break
                    event: Any = from_json(data)
                    if event.get("error"):
                        return Answer(error=str(event["error"])[:_MAX_ERROR_BYTES], end_s=now)
                    texts = [choice.get("text") for choice in event.get("choices") or ()]
                    # The last event may only say why the answer ends.
                    if texts and (not token_s or any(texts)):
                        token_s.append(now)
                    usage = event.get("usage") or usage
            if not is_done or not token_s:
                return Answer(error="the stream ended before its end", end_s=self._clock())
            details = usage.get("prompt_tokens_details") or {}
            return Answer(
                token_s=tuple(token_s),
                end_s=self._clock(),
                prompt_tokens=_count(usage.get("prompt_tokens")),
                output_tokens=_count(usage.get("completion_tokens")) or len(token_s),
                cached_tokens=_count(details.get("cached_tokens")),
            )
        except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, TypeError) as error:
            return Answer(error=f"{type(error).__name__}: {error}"[:_MAX_ERROR_BYTES], end_s=self._clock())

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside of its context"
        return self._session


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """All of it. Raises ValueError for what does not end."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise ValueError(f"the answer is longer than {_MAX_BODY_BYTES:,} bytes")
    return bytes(content)


def _count(value: object) -> int:
    """Of tokens. Raises ValueError."""
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def completion_body(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """A streaming completion that gives exactly `max_tokens`, whatever end ids come."""
    return json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        separators=(",", ":"),
    ).encode()


async def wait_until(at_s: float, clock: Callable[[], float]) -> None:
    """Sleeps until the clock says so."""
    if (left_s := at_s - clock()) > 0:
        await asyncio.sleep(left_s)
