"""The OpenAI chat endpoint as `tandem chat` uses it: one request, a stream of text, and the numbers of it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.cli.terminal import CommandFailed
from cluster.replies import Reply, ask, from_json, read

_CONNECT_S = 5.0
_PATIENCE_S = 120.0  # between two chunks, and for an answer that is no stream
_MOST_LINE_BYTES = 16 << 20


@dataclass(slots=True)
class AnswerStats:
    """What one answer took. Filled while it streams; tokens come with the last chunk."""

    ttft_s: float | None = None  # time to the first text
    total_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first over the time after the first."""
        if self.ttft_s is None or not self.completion_tokens or self.total_s <= self.ttft_s:
            return None
        return (self.completion_tokens - 1) / (self.total_s - self.ttft_s)


class ChatClient:
    """Talks to one server. Every wait is bounded: 5 s to connect, 120 s between two chunks."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """headers: with an API key, where the server wants one."""
        self.url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(_PATIENCE_S, connect=_CONNECT_S)
        try:
            self._http = httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, headers=headers)
        except httpx.InvalidURL as error:
            raise CommandFailed(f"{url!r} is not a URL: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def models(self) -> list[str]:
        """Names of the served models. Raises CommandFailed when nothing answers."""
        try:
            reply = ask(self._http, "GET", "/v1/models", timeout_s=_PATIENCE_S, connect_s=_CONNECT_S)
        except httpx.HTTPError as error:
            raise CommandFailed(
                f"nothing answers at {self.url} ({error}); start it with `tandem serve`, or give --url"
            ) from error
        if reply.status != 200:
            remedy = "; give --api-keys-file FILE" if reply.status == 401 else ""
            raise CommandFailed(f"{self.url}/v1/models: {_error_text(reply)}{remedy}")
        try:
            names = [str(model["id"]) for model in reply.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandFailed(
                f"what answers at {self.url} is not an OpenAI-compatible API; give another --url"
            ) from error
        if not names:
            raise CommandFailed(f"{self.url} serves no model")
        return names

    def stream(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        settings: Mapping[str, Any],
        stats: AnswerStats,
    ) -> Generator[str, None, None]:
        """Pieces of the answer as they come. Closing the iterator closes the connection, and with it the
        request on the server. Raises CommandFailed with the server's own words."""
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        started = time.monotonic()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    deadline = time.monotonic() + _PATIENCE_S
                    raise CommandFailed(_error_text(read(response, deadline, timeout_s=_PATIENCE_S)))
                for event in _events(_lines(response.iter_bytes())):
                    try:
                        text = _take(event, stats)
                    except (AttributeError, LookupError, TypeError) as error:
                        raise CommandFailed(
                            f"the server sent what is not a chunk: {str(event)[:200]}"
                        ) from error
                    if text:
                        if stats.ttft_s is None:
                            stats.ttft_s = time.monotonic() - started
                        yield text
        except httpx.HTTPError as error:
            raise CommandFailed(f"the connection to {self.url} broke: {error}") from error
        finally:
            stats.total_s = time.monotonic() - started


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Lines of a byte stream, split at LF or CRLF only: text may hold other Unicode line ends."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if len(rest) > _MOST_LINE_BYTES:
            raise CommandFailed(f"the server sent a line of more than {_MOST_LINE_BYTES:,} bytes")
    if rest:
        yield rest.decode(errors="replace")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream, up to `[DONE]`. Comments keep the line alive only."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = from_json(data)
        except ValueError as error:
            raise CommandFailed(f"the server sent what is not JSON: {data[:200]!r}") from error
        if not isinstance(event, dict):
            raise CommandFailed(f"the server sent what is not a chunk: {data[:200]!r}")
        if fault := event.get("error"):
            raise CommandFailed(str(fault.get("message", fault) if isinstance(fault, dict) else fault))
        yield event
    raise CommandFailed("the answer ended before it was complete; the server went away")


def _take(event: dict[str, Any], stats: AnswerStats) -> str:
    """The text of a chunk; its numbers go into the stats."""
    usage = event.get("usage")
    if usage:
        stats.prompt_tokens = _count(usage.get("prompt_tokens"))
        stats.completion_tokens = _count(usage.get("completion_tokens"))
        stats.cached_tokens = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    text = ""
    for choice in event.get("choices") or ():
        text += choice.get("delta", {}).get("content") or ""
        stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
    return text


def _count(value: object) -> int | None:
    """Raises TypeError for what is neither a number of tokens nor null."""
    if value is not None and type(value) is not int:
        raise TypeError(f"{value!r} is no number of tokens")
    return value


def _error_text(reply: Reply) -> str:
    """The message of an OpenAI error body, with what helps to follow it up."""
    try:
        text = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = reply.text[:500] or "no message"
    extra = [f"status {reply.status}"]
    extra += [f"retry after {reply.headers['retry-after']} s"] if "retry-after" in reply.headers else []
    extra += [f"request {reply.headers['x-request-id']}"] if "x-request-id" in reply.headers else []
    return f"{text} ({', '.join(extra)})"
