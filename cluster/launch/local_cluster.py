"""Start a local Ray cluster, deploy on it, wait until it serves, and stop exactly what was started.

Life cycle: `start_local_cluster` runs `ray start --head --block` as a child and returns when its dashboard
answers; `deploy` hands it the config; `wait_ready` follows Serve's own status until the router says that a
token has come from every group; `stop_all` lets requests finish, ends the child, and then ends, by process
id, whatever still carries this cluster's mark (`cluster.launch.marked`). Should this process be killed
before that, its guardian does the last part.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.launch.guardian import Guardian
from cluster.launch.haproxy import file_switches, write_wrapper
from cluster.launch.marked import MARK, end_marked
from cluster.running.serve_api import ServeApi, ServeApiError, ServeApiTimeout, read_token, token_path

_TAIL_LINES = 15  # of a log, in an error
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Ports of Serve with a fixed default, which two clusters of one machine would share without a word. Requests
# go through the fallback proxy while HAProxy knows of no router: when it is being updated, or has just died.
_SERVE_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


class LaunchError(RuntimeError):
    """The cluster or the application did not come up; the message says what to change."""


class _RayEnded(LaunchError):
    """Ray's head process ended before its dashboard answered."""


Report = Callable[[str], None]  # receives one line of news while something starts


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A Ray cluster that this process started."""

    head: subprocess.Popen[bytes]
    api: ServeApi
    gcs_address: str
    folder: Path  # Ray's session files and logs; removed by stop_all
    mark: str  # value of MARK in the environment of all its processes
    guardian: Guardian


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Raise LaunchError when the port is taken. HAProxy would share it silently with another HAProxy."""
    with socket.socket() as probe:
        # What a stopped server left in TIME_WAIT is no obstacle; a listener is, with this option too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} on {host} cannot be used: {error.strerror}; stop what listens there "
                "or choose another port (--port N, or http_options.port in the file)"
            ) from error


def start_local_cluster(
    *,
    num_cpus: int | None = None,
    dashboard_port: int = 8265,
    report: Report = lambda news: None,
    timeout_s: float = 60.0,
) -> LocalCluster:
    """Start Ray on this machine, on the loopback address, with token authentication.

    `dashboard_port` is a wish: another free one is taken when it is in use. The environment switches for
    Serve's HAProxy ingress are set here too, for configs that do not carry them. A Ray that ends at once gets
    a second try: on a busy machine its processes give each other up, and a free port may have been taken.
    """
    report("starting a local Ray cluster")
    _ensure_token()
    try:
        return _start_head(num_cpus, dashboard_port, report, timeout_s)
    except _RayEnded as error:
        report(f"{str(error).partition(':')[0]}, trying once more")
    return _start_head(num_cpus, dashboard_port, report, timeout_s)


def _start_head(num_cpus: int | None, dashboard_port: int, report: Report, timeout_s: float) -> LocalCluster:
    mark = secrets.token_hex(8)
    folder = Path(tempfile.mkdtemp(prefix="tandem-ray-"))  # short: Unix sockets are made inside
    try:
        check_port("127.0.0.1", dashboard_port)
    except LaunchError:
        dashboard_port = free_port()
    gcs_port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--node-ip-address", "127.0.0.1", "--port", str(gcs_port), "--temp-dir", str(folder)]
    command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)]
    for option in ("--dashboard-agent-listen-port", "--ray-client-server-port", "--metrics-export-port"):
        command += [option, str(free_port())]  # their fixed defaults clash with another cluster's
    command += ["--disable-usage-stats"]
    if num_cpus is not None:
        command += ["--num-cpus", str(num_cpus)]
    guardian = Guardian.start(mark, folder)
    log = folder / "head.log"
    with log.open("wb") as output:
        head = subprocess.Popen(
            command,
            env=_cluster_environment(mark, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal reaches us, and we stop it in order
        )
    api = ServeApi(f"http://127.0.0.1:{dashboard_port}", read_token())
    cluster = LocalCluster(
        head=head,
        api=api,
        gcs_address=f"127.0.0.1:{gcs_port}",
        folder=folder,
        mark=mark,
        guardian=guardian,
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not api.is_reachable():
            if head.poll() is not None:
                raise _RayEnded(f"Ray ended at once (code {head.returncode}):\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise LaunchError(f"Ray's dashboard did not answer in {timeout_s:.0f} s:\n{_tail(log)}")
            time.sleep(0.2)
    except BaseException:  # Ctrl-C too must leave nothing behind
        stop_all(cluster, grace_s=0)
        raise
    report(f"Ray is up, dashboard at {api.url}")
    return cluster


def deploy(
    api: ServeApi,
    config: Mapping[str, Any],
    *,
    report: Report = lambda news: None,
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
    report: Report = lambda news: None,
    timeout_s: float = 900.0,
    is_alive: Callable[[], bool] = lambda: True,
) -> None:
    """Return when `url` + `/ready` answers 200: a real token has come from every group.

    `headers`: with an API key, where the service wants one. Raises LaunchError with Serve's message as soon
    as the deployment has failed, or when the key is refused.
    """
    deadline = time.monotonic() + timeout_s
    last = ""
    with httpx.Client(timeout=5.0, trust_env=False, headers=headers) as client:
        while True:
            if not is_alive():
                raise LaunchError("the Ray cluster ended while the application started")
            status, message = _application_status(api, application)
            if status in ("DEPLOY_FAILED", "UNHEALTHY") and message:
                raise LaunchError(f"deployment failed: {plain_message(message)}")
            if message != last:
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
            if time.monotonic() > deadline:
                raise LaunchError(f"not ready in time (--timeout-s); Serve says: {status} {message}")
            time.sleep(0.25)


def stop_all(cluster: LocalCluster, *, grace_s: float = 30.0) -> list[str]:
    """Stop the cluster and everything on it; requests in flight get up to `grace_s` to finish.

    Returns id and title of processes that had to be killed at the very end (none, when all went well).
    """
    deadline = time.monotonic() + grace_s
    if grace_s > 0 and cluster.head.poll() is None:
        with contextlib.suppress(ServeApiError):
            cluster.api.remove_applications()
            while cluster.api.details().get("applications") and time.monotonic() < deadline:
                time.sleep(0.2)
            cluster.api.shut_down()
    if cluster.head.poll() is None:
        cluster.head.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        cluster.head.wait(timeout=20.0)
    killed = end_marked(cluster.mark, term_s=3.0, kill_s=3.0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        cluster.head.wait(timeout=1.0)
    shutil.rmtree(cluster.folder, ignore_errors=True)
    cluster.guardian.dismiss()
    return killed


def _cluster_environment(mark: str, folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    environment |= {
        MARK: mark,
        "RAY_AUTH_MODE": "token",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",  # Serve ends an ingress that is not up in 3 x 5 s
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # stop_all has drained before it ends the head
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_wrapper(folder)),
        **file_switches(folder),
    }
    for name in _SERVE_PORTS:
        environment.setdefault(name, str(free_port("0.0.0.0")))  # as HAProxy binds it
    # The driver of another cluster must not adopt this one's children, nor this one another address.
    environment.pop("RAY_ADDRESS", None)
    return environment


def _ensure_token() -> None:
    """Make the token of this user's clusters when there is none yet; only the owner may read it."""
    if read_token() is not None:
        return
    path = token_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def _application_status(api: ServeApi, application: str) -> tuple[str, str]:
    """Serve's status of the application, and a line that says what it is doing."""
    try:
        details = api.details()
    except ServeApiError:
        return "UNKNOWN", ""
    app = details.get("applications", {}).get(application)
    if app is None:
        return "UNKNOWN", "waiting for Serve"
    status, message = str(app.get("status", "")), str(app.get("message", ""))
    if status in ("DEPLOY_FAILED", "UNHEALTHY"):
        parts = [str(d.get("message", "")) for d in app.get("deployments", {}).values()]
        return status, "\n".join(part for part in [message, *parts] if part)
    counts = []
    for name, deployment in app.get("deployments", {}).items():
        replicas = deployment.get("replicas", [])
        running = sum(replica.get("state") == "RUNNING" for replica in replicas)
        counts.append(f"{name} {running}/{deployment.get('target_num_replicas', len(replicas))}")
    return status, ", ".join(counts) or "building the application"


def plain_message(message: str) -> str:
    """Serve's message with each trace of Python calls replaced by the exception that ended it."""
    kept: list[str] = []
    ending: list[str] = []  # the newest exception of the trace being read, all lines of its text
    is_trace = False
    for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines():
        if line.startswith(("Traceback ", "ray::")):
            is_trace = True
        elif not is_trace:
            kept.append(line)
        elif line.startswith(("During handling of", "The above exception")):
            ending = []  # the next one tells the reader more
        elif re.match(r"(\w+\.)*\w*(Error|Exception|Failure)\b", line):
            ending = [re.sub(r"^(\w+\.)+(?=\w+)", "", line)]
        elif ending and line.strip():
            ending.append(line)
    return "\n".join(line for line in [*kept, *ending] if line.strip())


def _tail(log: Path) -> str:
    """The last lines of a log, without what colours them on a terminal."""
    text = _COLOUR.sub("", log.read_text(errors="replace"))
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
