"""torch.distributed for the ranks of one group: gloo on CPUs, NCCL on GPUs, one for each rank.

The store of rank 0 listens on the given address only. Every collective is bounded by a timeout; both backends
connect at start, and a first collective proves it (a lazily made connection has ignored timeouts). Of NCCL
rank 0's watchdog keeps the time, of a step and of the warm-up (`LeaderLink.limit_steps`, `limited`): what is
replayed has no timeout of its own. torch's is longer than both, as a rank may compile kernels for minutes
while others wait for it in a collective; when it is reached torch ends the process, and says less.

Ranks that share a GPU go through the host, with gloo: every collective waits, so no graph can hold it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from threading import Lock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from workers.engine.step import GroupFailed
from workers.model.parallel import TensorParallel

_SIOCGIFADDR = 0x8915  # Linux: address of a network interface
STORE_TIMEOUT_S = 60.0  # for the ranks to meet
WARM_UP_TIMEOUT_S = 600.0  # for first collectives, and for first steps of all kinds with what they compile


class ProcessGroup:
    """Membership of this process in its group. One per process: torch keeps a default group."""

    def __init__(
        self,
        store: TCPStore,
        *,
        host: str,
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        timeout_s: float,
    ) -> None:
        """backend: gloo or nccl, on all ranks the same. Returns when all ranks have met and a collective has
        worked. Raises GroupFailed."""
        self._is_nccl = backend == "nccl"
        self._timeout_s = timeout_s
        self._leaving = Lock()
        # The one way to tell the backends of the default group which interface to use.
        if self._is_nccl:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={_interface_of(host)}")
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = _interface_of(host)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s + (WARM_UP_TIMEOUT_S if self._is_nccl else 0.0)),
                device_id=device if self._is_nccl else None,  # connects now
            )
            total = torch.full((1,), rank, dtype=torch.float32, device=device)
            dist.all_reduce(total)
        except RuntimeError as error:
            raise GroupFailed(f"rank {rank} could not form a process group: {error}") from error
        if int(total.item()) != size * (size - 1) // 2:
            raise GroupFailed(f"rank {rank}: the first all-reduce gave {total.item()}")
        self.parallel = TensorParallel(rank=rank, size=size, is_recordable=self._is_nccl)

    @property
    def interrupt(self) -> Callable[[], None] | None:
        """Ends collectives that hang, of NCCL; from any thread. None: they end by themselves. Blocks while a
        graph holds them."""
        return self._abort if self._is_nccl else None

    def close(self) -> None:
        """Leaves the group, after an interrupt that is under way. May be called twice.

        Of NCCL no graph may hold a collective any more: it waits for them without end.
        """
        if not self._leaving.acquire(timeout=self._timeout_s):
            return  # the interrupt hangs, and so would this; it ends with the process
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        finally:
            self._leaving.release()

    def _abort(self) -> None:
        with self._leaving, contextlib.suppress(RuntimeError):
            if dist.group.WORLD is not None:
                dist.group.WORLD.abort()


def _interface_of(host: str) -> str:
    """Name of the network interface that has this IPv4 address."""
    address = socket.gethostbyname(host)
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise GroupFailed(f"no network interface of this machine has the address {host}")
