"""Hand a deployment to Serve, and follow it until it serves.

`deploy` returns when Serve has accepted it, and lists it; `wait_ready` follows Serve's own status until the
router says that a token has come from every group, or somebody has taken the application away again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from cluster.launch.errors import LaunchError, NotReadyInTime, TakenAway
from cluster.launch.news import Report, unheard
from cluster.running.group_table import FAILED_STATUSES
from cluster.running.plain import in_one_line, plain_message
from cluster.running.serve_api import ServeApi, ServeApiError, ServeApiTimeout, ServeApiUnreachable

_GONE: Final = ("DELETING", "MISSING")  # the first is Serve's
_UNREACHABLE: Final = "UNREACHABLE"
# An application that is gone for so long has been taken away: right after a deployment Serve may say what it
# was told before, and its controller lists nothing for a moment when it starts anew.
_GONE_S: Final = 10.0
_UNREACHABLE_S: Final = 30.0


def deploy(
    api: ServeApi,
    config: Mapping[str, Any],
    *,
    report: Report = unheard,
    timeout_s: float = 900.0,
) -> None:
    """Hand a config (already checked) to Serve. A slow dashboard is asked again until `timeout_s`."""
    report("handing the deployment to Serve")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return api.deploy(config)
        except ServeApiTimeout as error:
            if time.monotonic() > deadline:
                raise LaunchError(f"Serve took no deployment in {timeout_s:.0f} s: {error}") from error
            report(f"{error}; asking again")
        except ServeApiError as error:
            raise LaunchError(f"Serve took no deployment: {error}") from error


def wait_ready(
    api: ServeApi,
    *,
    application: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    report: Report = unheard,
    timeout_s: float = 900.0,
    is_alive: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when `url` + `/ready` answers 200: a real token has come from every group.

    `headers`: with an API key, where the service wants one. `is_alive`: whether the cluster still is, where
    that is known. Raises LaunchError with Serve's message as soon as the deployment has failed, and when the
    key is refused; NotReadyInTime; and TakenAway when the application, or the whole cluster, has been gone
    for some seconds.
    """
    listed = reached = clock()  # when the application was, and the dashboard
    deadline = listed + timeout_s
    last = ""
    with httpx.Client(timeout=5.0, trust_env=False, headers=headers) as client:
        while True:
            if is_alive is not None and not is_alive():
                raise LaunchError("the Ray cluster ended while the application started")
            status, message = _application_status(api, application)
            now = clock()
            listed = listed if status in _GONE else now
            reached = reached if status == _UNREACHABLE else now
            if status in FAILED_STATUSES and message:
                raise LaunchError(f"deployment failed: {plain_message(message)}")
            if now - listed > _GONE_S:
                raise TakenAway(
                    f"Serve runs no {application} any more: another command has taken it away, as "
                    "`tandem down` does; deploy again"
                )
            if now - reached > _UNREACHABLE_S:
                raise TakenAway(f"the cluster has been gone for {_UNREACHABLE_S:.0f} s: {message}")
            if message and message != last:
                last = message
                report(message)
            if status == "RUNNING":
                with contextlib.suppress(httpx.HTTPError):
                    code = client.get(f"{url}/ready").status_code
                    if code == 200:
                        report(f"serving at {url}")
                        return
                    if code == 401:
                        raise LaunchError(
                            f"{url} serves, but refuses the API key that stands first in "
                            "router.http.api_keys_file on this machine (or wants one and the file names none)"
                        )
            if now > deadline:
                raise NotReadyInTime(f"not ready in time (--timeout-s); Serve says: {status} {message}")
            time.sleep(0.25)


def _application_status(api: ServeApi, application: str) -> tuple[str, str]:
    """Serve's status of the application, and a line that says what it is doing."""
    try:
        details = api.details()
    except ServeApiUnreachable as error:
        return _UNREACHABLE, str(error)
    except ServeApiError as error:  # it is there: slow, or with a status as while Ray's own head recovers
        return "UNKNOWN", str(error)
    app = details.get("applications", {}).get(application)
    if app is None:
        return "MISSING", "Serve does not list the application"
    status, message = str(app.get("status", "")), str(app.get("message", ""))
    if status == "DELETING":
        return status, "Serve takes the application away"
    if status in FAILED_STATUSES:
        parts = [str(d.get("message", "")) for d in app.get("deployments", {}).values()]
        return status, "\n".join(part for part in [message, *parts] if part)
    counts = []
    for name, deployment in app.get("deployments", {}).items():
        replicas = deployment.get("replicas", [])
        running = sum(replica.get("state") == "RUNNING" for replica in replicas)
        target = deployment.get("target_num_replicas", len(replicas))
        trouble = in_one_line(deployment.get("message")) if running < target else ""
        counts.append(f"{name} {running}/{target}" + (f" ({trouble})" if trouble else ""))
    return status, ", ".join(counts) or "building the application"
