"""Ports of this machine."""

from __future__ import annotations

import socket

from cluster.launch.errors import LaunchError


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
