"""Grafana's HTTP API, as much of it as pushing needs, over grafana-api-sdk.

The SDK's own methods for folders, data sources and dashboards say neither the status nor the reason of a
refusal; its caller of any address does, so everything here goes through that one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from grafana_api.api import Api
from grafana_api.model import APIModel, RequestsMethods

from cluster.observe.prometheus_api import ObserveError, shown_url

_METHODS = {"GET": RequestsMethods.GET, "POST": RequestsMethods.POST, "PUT": RequestsMethods.PUT}
_NEEDED = "dashboards:write, folders:write and datasources:write (the role Admin has them)"


@dataclass(frozen=True, slots=True)
class Reply:
    """What Grafana answered."""

    status: int
    body: Mapping[str, Any]

    @property
    def is_ok(self) -> bool:
        """Done, or found."""
        return 200 <= self.status < 300


class GrafanaApi:
    """Calls to one Grafana with a service account's token. Each may take up to `timeout_s`."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 15.0) -> None:
        self.url = url.rstrip("/")
        self.shown = shown_url(self.url)
        # No proxy of the environment sees the token: the SDK brings its own transport.
        self._api = Api(
            APIModel(host=self.url, token=token, timeout=timeout_s, retries=0, follow_redirects=False)
        )

    def get(self, path: str) -> Reply:
        """A read; 404 is an answer. Raises ObserveError for anything else that is not one."""
        reply = self._call("GET", path, None)
        return reply if reply.status == 404 else self.expect(reply, f"reading {path}")

    def send(self, method: str, path: str, body: Mapping[str, Any]) -> Reply:
        """POST or PUT. Raises ObserveError when Grafana cannot be reached or does not let us in."""
        return self._call(method, path, body)

    def expect(self, reply: Reply, what: str) -> Reply:
        """The reply if it is a success; ObserveError else."""
        if reply.is_ok:
            return reply
        raise ObserveError(f"Grafana at {self.shown} refuses {what}: {reply.status} {_reason(reply)}")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Reply:
        try:
            with _quiet():
                answer: Any = self._api.call_the_api(
                    path,
                    _METHODS[method],
                    None if body is None else json.dumps(body),
                    response_status_code=True,
                )
        except httpx.ConnectError as error:
            # The SDK raises this as well for what Grafana says of a wrong token.
            if "API key" in str(error):
                raise self._unknown(str(error)) from error
            raise ObserveError(f"no Grafana answers at {self.shown}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ObserveError(f"no Grafana answers at {self.shown}: {error!r}") from error
        except (AttributeError, IndexError, RecursionError, TypeError) as error:
            # In the SDK, of an answer in no known form.
            raise self.stranger() from error
        if not isinstance(answer, dict) or not isinstance(answer.get("status"), int):
            raise self.stranger()
        reply = Reply(answer["status"], answer)
        if reply.status == 401:
            raise self._unknown(_reason(reply))
        if reply.status == 403:
            raise ObserveError(
                f"Grafana at {self.shown} does not let this token do that ({_reason(reply)}); its service "
                f"account needs {_NEEDED}"
            )
        return reply

    def stranger(self) -> ObserveError:
        """What to raise when the other side is something else."""
        return ObserveError(f"what answers at {self.shown} is no Grafana")

    def _unknown(self, reason: str) -> ObserveError:
        return ObserveError(
            f"Grafana at {self.shown} does not know this token ({reason}); make one under Administration, "
            "Service accounts, and put it into the file"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, nothing is logged to the root logger: the SDK says there what is raised as well."""

    def nothing(record: logging.LogRecord) -> bool:
        return False

    root = logging.getLogger()
    root.addFilter(nothing)
    try:
        yield
    finally:
        root.removeFilter(nothing)


def _reason(reply: Reply) -> str:
    return str(reply.body.get("message") or reply.body.get("data") or "no reason given").strip()[:500]
