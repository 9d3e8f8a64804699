"""Start a local Ray cluster, and stop exactly what was started.

Life cycle: `start_local_cluster` runs `ray start --head --block` as a child and returns when its dashboard
answers; `cluster.launch.handover` puts an application on it; `stop_all` lets requests finish, ends the
child, and then ends, by process id, whatever still carries this cluster's mark (`cluster.launch.marked`).
Should this process be killed before that, its guardian does the last part.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.child import module_command
from cluster.launch.dashboard import RayNotUp, wait_for_dashboard
from cluster.launch.errors import LaunchError
from cluster.launch.guardian import Guardian
from cluster.launch.haproxy import file_switches, write_wrapper
from cluster.launch.marked import MARK, end_marked
from cluster.launch.news import Report, unheard
from cluster.launch.periods import PERIODS
from cluster.launch.ports import free_port, reserved_port
from cluster.running.serve_api import ServeApi, ServeApiError, read_token, token_path

_MIN_FREE_BYTES = 100_000_000  # of the temporary folder: Ray's sockets and logs of an hour or two
# Ports of Serve with a fixed default, which two clusters of one machine would share without a word. Requests
# go through the fallback proxy while HAProxy knows of no router: when it is being updated, or has just died.
_SERVE_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A Ray cluster that this process started."""

    head: subprocess.Popen[bytes]
    api: ServeApi
    gcs_address: str
    folder: Path  # Ray's session files and logs; removed by stop_all
    mark: str  # value of MARK in the environment of all its processes
    guardian: Guardian


def start_local_cluster(
    *,
    num_cpus: int | None = None,
    dashboard_port: int = 8265,
    report: Report = unheard,
    timeout_s: float = 60.0,
) -> LocalCluster:
    """Start Ray on this machine, on the loopback address, with token authentication.

    `dashboard_port` is a wish: another free one is taken when it is in use. The environment switches for
    Serve's HAProxy ingress are set here too, for configs that do not carry them. A Ray that ends at once gets
    a second try: on a busy machine its processes give each other up, and a free port may have been taken.
    """
    report("starting a local Ray cluster")
    _ensure_token()
    _check_room()
    try:
        with _dashboard_port(dashboard_port) as port:
            return _start_head(num_cpus, port, report, timeout_s)
    except RayNotUp as error:
        report(f"{str(error).partition(':')[0]}, trying once more")
    with _dashboard_port(dashboard_port) as port:
        return _start_head(num_cpus, port, report, timeout_s)


@contextlib.contextmanager
def _dashboard_port(wish: int) -> Iterator[int]:
    """The port wished for, held until the dashboard has it, or any other when somebody else has that."""
    with contextlib.ExitStack() as promise:
        try:
            promise.enter_context(reserved_port("127.0.0.1", wish))
        except LaunchError:
            wish = free_port()
            promise.enter_context(reserved_port("127.0.0.1", wish))
        yield wish


def _start_head(num_cpus: int | None, dashboard_port: int, report: Report, timeout_s: float) -> LocalCluster:
    gcs_port = free_port()
    mark = secrets.token_hex(8)
    with contextlib.ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="tandem-ray-"))  # short: Unix sockets are made inside
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        guardian = Guardian.start(mark, folder)
        undo.callback(guardian.end_all)  # Ctrl-C may come when the head runs and Popen has not returned
        log = folder / "head.log"
        with log.open("wb") as output:
            head = subprocess.Popen(
                _head_command(folder, gcs_port, dashboard_port, num_cpus),
                env=_cluster_environment(mark, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal reaches us, and we stop it in order
            )
        undo.pop_all()
    cluster = LocalCluster(
        head=head,
        api=ServeApi(f"http://127.0.0.1:{dashboard_port}", read_token()),
        gcs_address=f"127.0.0.1:{gcs_port}",
        folder=folder,
        mark=mark,
        guardian=guardian,
    )
    try:
        wait_for_dashboard(cluster.api, head, folder=folder, log=log, timeout_s=timeout_s)
    except BaseException as error:  # Ctrl-C too must leave nothing behind
        if isinstance(error, KeyboardInterrupt):
            report("stopping the Ray cluster that was starting")
        stop_all(cluster, grace_s=0)
        raise
    report(f"Ray is up, dashboard at {cluster.api.url}")
    return cluster


def _head_command(folder: Path, gcs_port: int, dashboard_port: int, num_cpus: int | None) -> list[str]:
    command = module_command("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats")
    command += ["--node-ip-address", "127.0.0.1", "--port", str(gcs_port), "--temp-dir", str(folder)]
    command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)]
    command += ["--include-log-monitor", "false"]  # it sends every line to drivers, and there are none
    for option in ("--dashboard-agent-listen-port", "--ray-client-server-port", "--metrics-export-port"):
        command += [option, str(free_port())]  # their fixed defaults clash with another cluster's
    if num_cpus is not None:
        command += ["--num-cpus", str(num_cpus)]
    return command


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
    environment = PERIODS | os.environ
    environment |= {
        MARK: mark,
        "RAY_AUTH_MODE": "token",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",  # Serve ends an ingress that is not up in 3 x 5 s
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",  # that streams may last after an update
        "RAY_worker_niceness": "0",  # 15 without: all else on the machine would go before the engine
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # stop_all has drained before it ends the head
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_wrapper(folder)),
        **file_switches(folder),
    }
    for name in _SERVE_PORTS:
        environment.setdefault(name, str(free_port("0.0.0.0")))  # as HAProxy binds it
    # The driver of another cluster must not adopt this one's children, nor this one another address.
    environment.pop("RAY_ADDRESS", None)
    return environment


def _check_room() -> None:
    """Ray without room for its files ends without a word, or with one in a log that it cannot write."""
    folder = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _MIN_FREE_BYTES:
        raise LaunchError(
            f"{folder} has {free_bytes / 1e6:.1f} MB free, and Ray's sockets and logs there need "
            f"{_MIN_FREE_BYTES / 1e6:.0f} MB; make room, or set TMPDIR to another folder"
        )


def _ensure_token() -> None:
    """Make the token of this user's clusters when there is none yet; only the owner may read it."""
    if read_token() is not None:
        return
    path = token_path()
    try:
        _write_token(path)
    except OSError as error:
        raise LaunchError(
            f"cannot write the token of Ray to {path}: {error.strerror or error}; make the folder writable, "
            "or set HOME or RAY_AUTH_TOKEN_PATH to another place"
        ) from error
    if read_token() is None:
        raise LaunchError(
            f"{path} holds no token that can be read; remove it, and the next start makes another"
        )


def _write_token(path: Path) -> None:
    """A new token, whole or not at all, and never over one that somebody else has made. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
