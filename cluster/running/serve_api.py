"""Ray Serve's declarative HTTP API, as much of it as Tandem's commands need. No Ray import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.replies import Reply, ask

_APPLICATIONS = "/api/serve/applications/"
_VERSION = "/api/version"


class ServeApiError(RuntimeError):
    """The dashboard cannot be reached, or refused what was asked; the message says which and why."""


def token_path() -> Path:
    """Where Ray keeps the cluster's token on this machine."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def read_token() -> str | None:
    """The cluster's token, found as Ray's own clients find it; None when there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    try:
        return token_path().read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def ingress_url(host: str, port: int) -> str:
    """Where what Serve's `http_options` make listen on `host` answers, as seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class ServeApiTimeout(ServeApiError):
    """The dashboard took too long; what was asked may have been done, or not."""


class ServeApiUnreachable(ServeApiError):
    """No dashboard answers at all."""


@dataclass(frozen=True, slots=True)
class ServeApi:
    """Calls to one cluster's dashboard, `http://127.0.0.1:8265` for example."""

    url: str
    token: str | None = None
    timeout_s: float = 30.0  # for one answer

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Make the cluster look like the config. Returns when it is accepted, before it is true.

        Asking twice for the same changes nothing more.
        """
        self._call("PUT", config)

    def details(self) -> dict[str, Any]:
        """What Serve runs: applications with status, message, deployments and replicas."""
        answer = self._read(_APPLICATIONS)
        found = answer.get("applications", {})
        if not isinstance(found, dict) or not all(isinstance(app, dict) for app in found.values()):
            raise self._stranger()
        return answer

    def session(self) -> str:
        """Name of the run of Ray whose dashboard this is; no other run on the machine has it."""
        return str(self._read(_VERSION).get("session_name", ""))

    def remove_applications(self) -> None:
        """Remove all applications; requests in flight finish. Serve's ingress stays up, which they need.

        (DELETE would end the ingress at the same time and cut them.)
        """
        running = self.details()
        kept = {key: running[key] for key in ("proxy_location", "http_options") if running.get(key)}
        self._call("PUT", {**kept, "applications": []})

    def shut_down(self) -> None:
        """End Serve on the cluster, with whatever is still running on it."""
        self._call("DELETE")

    def is_reachable(self) -> bool:
        """Whether a Ray dashboard answers, and lets us in."""
        try:
            self._call("GET")
        except ServeApiError:
            return False
        return True

    def _read(self, path: str) -> dict[str, Any]:
        try:
            answer = self._call("GET", path=path).json()
        except ValueError as error:
            raise self._stranger() from error
        if not isinstance(answer, dict):
            raise self._stranger()
        return answer

    def _stranger(self) -> ServeApiError:
        return ServeApiError(f"what answers at {self.url} is not a Ray dashboard")

    def _call(
        self, method: str, body: Mapping[str, Any] | None = None, *, path: str = _APPLICATIONS
    ) -> Reply:
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            # trust_env off: a proxy from the environment must never see the token.
            with httpx.Client(trust_env=False) as client:
                reply = ask(
                    client, method, self.url + path, timeout_s=self.timeout_s, headers=headers, body=body
                )
        except httpx.TimeoutException as error:
            raise ServeApiTimeout(
                f"the Ray dashboard at {self.url} did not answer within {self.timeout_s:g} s"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServeApiUnreachable(f"no Ray dashboard answers at {self.url}: {error}") from error
        if reply.status in (401, 403):
            place = token_path()
            raise ServeApiError(
                f"the Ray cluster at {self.url} wants a token and refused ours; it is read from "
                f"RAY_AUTH_TOKEN or {place}"
            )
        if reply.status != 200:
            raise ServeApiError(f"{self.url} answered {reply.status}: {reply.text[-2000:]}")
        return reply
