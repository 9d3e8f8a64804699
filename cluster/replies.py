"""Answers of other programs over HTTP, which may be anything: read whole, within a time and a size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]  # names in any case
    content: bytes

    @property
    def text(self) -> str:
        """As far as it is text."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Raises ValueError."""
        return from_json(self.content)


def from_json(text: str | bytes) -> Any:
    """Raises ValueError, also for what is nested so deeply that Python raises another error."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def ask(
    client: httpx.Client,
    method: str,
    url: str,
    *,
    timeout_s: float,
    connect_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    form: Mapping[str, str] | None = None,
    most_bytes: int = _MOST_BYTES,
) -> Reply:
    """One request. Raises httpx.HTTPError, also when an answer whose headers are there has not ended after
    `timeout_s`, though something came all the while, or does not end at `most_bytes`. Raises
    httpx.InvalidURL. `connect_s`: sooner for the connection."""
    deadline = time.monotonic() + timeout_s
    timeout = httpx.Timeout(timeout_s, connect=timeout_s if connect_s is None else connect_s)
    with client.stream(method, url, timeout=timeout, headers=headers, json=body, data=form) as response:
        return read(response, deadline, timeout_s=timeout_s, most_bytes=most_bytes)


def read(
    response: httpx.Response, deadline: float, *, timeout_s: float, most_bytes: int = _MOST_BYTES
) -> Reply:
    """The rest of a streamed answer; see `ask`. `timeout_s` is for the words."""
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > most_bytes:
            raise httpx.RemoteProtocolError(f"the answer is longer than {most_bytes:,} bytes")
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout(f"the answer had not ended after {timeout_s:g} s")
    return Reply(response.status_code, response.headers, bytes(content))
