"""Prometheus' HTTP API, as much of it as pages need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx


class ObserveError(RuntimeError):
    """Prometheus or Grafana cannot be reached, or refused; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of an answer. A value is NaN where Prometheus says so."""

    labels: Mapping[str, str]
    values: tuple[tuple[float, float], ...]  # (seconds since 1970, value), ascending


@dataclass(frozen=True, slots=True)
class PrometheusApi:
    """Calls to one Prometheus, `http://127.0.0.1:9090` for example."""

    url: str
    timeout_s: float = 30.0  # for one answer

    def query_range(self, expr: str, *, start: float, end: float, step_s: float) -> list[Line]:
        """A query at every step from start to end (seconds since 1970). Raises ObserveError."""
        query = {"query": expr, "start": str(start), "end": str(end), "step": str(step_s)}
        data = self._data("/api/v1/query_range", query)
        try:
            return [
                Line(row["metric"], tuple((float(time), float(value)) for time, value in row["values"]))
                for row in data["result"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise self._stranger() from error

    def _data(self, path: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        try:
            with httpx.Client(timeout=self.timeout_s, trust_env=False) as client:
                response = client.post(self.url + path, data=dict(query))
            body = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ObserveError(
                f"no Prometheus answers at {self.url} ({error}); `tandem metrics up` starts one"
            ) from error
        except ValueError as error:
            raise self._stranger() from error
        if not isinstance(body, dict):
            raise self._stranger()
        if body.get("status") != "success":
            raise ObserveError(f"{self.url} refuses {query['query']}: {body.get('error', response.text)}")
        data = body.get("data")
        if not isinstance(data, dict):
            raise self._stranger()
        return data

    def _stranger(self) -> ObserveError:
        return ObserveError(f"what answers at {self.url} is no Prometheus")
