"""torch.distributed for the ranks of one group: gloo on CPU, NCCL on CUDA.

The store of rank 0 listens on the given address only. Every collective is bounded by the timeout; gloo
connects all pairs at start, and a first collective proves it (a lazily made connection has ignored timeouts).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from workers.engine.step import GroupFailed
from workers.model.parallel import TensorParallel

_SIOCGIFADDR = 0x8915  # Linux: address of a network interface
STORE_TIMEOUT_S = 60.0  # for the ranks to meet


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
        timeout_s: float,
    ) -> None:
        """Returns when all ranks have met and a collective has worked. Raises GroupFailed."""
        if device.type == "cpu":
            # The one way to tell gloo of the default group which interface to use.
            os.environ["GLOO_SOCKET_IFNAME"] = _interface_of(host)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
            total = torch.full((1,), rank, dtype=torch.float32, device=device)
            dist.all_reduce(total)
        except RuntimeError as error:
            raise GroupFailed(f"rank {rank} could not form a process group: {error}") from error
        if int(total.item()) != size * (size - 1) // 2:
            raise GroupFailed(f"rank {rank}: the first all-reduce gave {total.item()}")
        self.parallel = TensorParallel(rank=rank, size=size)

    def close(self) -> None:
        """Leaves the group. May be called twice."""
        if dist.is_initialized():
            dist.destroy_process_group()


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
