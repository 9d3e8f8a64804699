"""Prometheus' HTTP API, as much of it as pages need."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from cluster.replies import ask


class ObserveError(RuntimeError):
    """Prometheus or Grafana cannot be reached, or refused; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of an answer. A value is NaN where Prometheus says so."""

    labels: Mapping[str, str]
    values: tuple[tuple[float, float], ...]  # (seconds since 1970, value), ascending


def shown_url(url: str) -> str:
    """An address as it may be printed: without a name and password in it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _line(row: Any) -> Line:
    """One series, checked. Raises KeyError, TypeError, ValueError or OverflowError."""
    labels = row["metric"]
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise TypeError("labels are no texts by name")
    values = tuple((float(time), float(value)) for time, value in row["values"])
    if not all(math.isfinite(time) for time, _ in values):
        raise ValueError("a time is no finite number")
    return Line(labels, values)


@dataclass(frozen=True, slots=True)
class PrometheusApi:
    """Calls to one Prometheus, `http://127.0.0.1:9090` for example."""

    url: str
    timeout_s: float = 30.0  # for one answer
    # Reading the certificates takes a tenth of a second: once, and not for every query.
    _certificates: ssl.SSLContext = field(default_factory=httpx.create_ssl_context, repr=False, compare=False)

    def query_range(self, expr: str, *, start: float, end: float, step_s: float) -> list[Line]:
        """A query at every step from start to end (seconds since 1970). Raises ObserveError."""
        query = {"query": expr, "start": str(start), "end": str(end), "step": str(step_s)}
        data = self._data("/api/v1/query_range", query)
        try:
            return [_line(row) for row in data["result"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._stranger() from error

    def _data(self, path: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        try:
            with httpx.Client(trust_env=False, verify=self._certificates) as client:
                reply = ask(client, "POST", self.url + path, timeout_s=self.timeout_s, form=query)
            body = reply.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ObserveError(
                f"no Prometheus answers at {shown_url(self.url)} ({error}); `tandem metrics up` starts one"
            ) from error
        except ValueError as error:
            raise self._stranger() from error
        if not isinstance(body, dict):
            raise self._stranger()
        if body.get("status") != "success":
            raise ObserveError(
                f"{shown_url(self.url)} refuses {query['query']}: {body.get('error', reply.text)}"
            )
        data = body.get("data")
        if not isinstance(data, dict):
            raise self._stranger()
        return data

    def _stranger(self) -> ObserveError:
        return ObserveError(f"what answers at {shown_url(self.url)} is no Prometheus")
