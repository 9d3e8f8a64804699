"""Ports of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.launch.errors import LaunchError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_port(host: str, port: int) -> None:
    """Raise LaunchError when the port is taken. HAProxy would share it silently with another HAProxy."""
    try:
        with socket.socket(_family(host)) as probe:
            # What a stopped server left in TIME_WAIT is no obstacle; a listener is, with this option too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise LaunchError(
            f"port {port} on {host} cannot be used: {error.strerror}; stop what listens there "
            "or choose another port (--port N, or http_options.port in the file)"
        ) from error


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[None]:
    """Inside, no other command of ours takes the port. Raises LaunchError when it is taken or promised.

    What we start binds it much later (Ray's dashboard and Serve's ingress after half a minute, on a busy
    machine), and until then it looks free to whoever starts another.
    """
    check_port(host, port)
    with socket.socket(socket.AF_UNIX) as promise:
        try:
            promise.bind(f"\0tandem-port-{port}")  # an abstract name: no file, and gone with this process
        except OSError as error:
            raise LaunchError(
                f"port {port} on {host} cannot be used: another tandem command that is starting has taken "
                "it; choose another port (--port N, or http_options.port in the file)"
            ) from error
        yield
