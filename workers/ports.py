"""Listening on a free port of one address of this machine, and only of that one: raw, or as torch's store."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it without saying so


def open_port(host: str) -> socket.socket:
    """A listening socket. Raises OSError when this machine does not have the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=64)


def open_store(host: str, *, timeout_s: float) -> TCPStore:
    """A store for a process group to meet in; `port` says where. timeout_s: of every wait in it."""
    listener = open_port(host)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """The store that another process has opened. Raises RuntimeError when it cannot be reached."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
