"""torch's symmetric memory: which GPUs this process can share a buffer with, and the buffer.

Some of the names that this takes of torch are not documented: the allocation, signal pads, what tells of
NVLink. What a version lacks or refuses raises RuntimeError, and the group goes on with NCCL
(`workers.runtime.symmetric_memory`).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch._C import _distributed_c10d as c10d
from torch._C._autograd import DeviceType

_RELEASE_S = 5.0  # in which the steps that had begun are over


class TorchPeers:
    """The GPUs that a rank's process sees."""

    def __init__(self, device: torch.device) -> None:
        """device: of this rank; its process group exists."""
        self._device = device

    @property
    def name(self) -> str:
        """Of this rank's GPU, for all processes. Raises RuntimeError."""
        return _uuid(self._device.index)

    def reachable(self) -> list[str]:
        """Names of the others that this one reads, writes and signals. Signals are atomic operations in the
        other's memory, which PCIe does not carry: only NVLink does. Raises RuntimeError."""
        own, operators = self._device.index, torch.ops.symm_mem
        if not (hasattr(operators, "one_shot_all_reduce_out") and hasattr(operators, "two_shot_all_reduce_")):
            raise RuntimeError(f"torch {torch.__version__} lacks the operators")
        try:
            links = c10d._detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix  # type: ignore[attr-defined]
        except AttributeError as error:
            raise RuntimeError(f"this torch does not tell of NVLink: {error}") from error
        return [
            _uuid(other)
            for other in range(torch.cuda.device_count())
            if other != own and links[own][other] and torch.cuda.can_device_access_peer(own, other)
        ]

    def allocate(self, num_bytes: int) -> TorchPeerMemory:
        """Raises RuntimeError."""
        return TorchPeerMemory(self._device, num_bytes)


class TorchPeerMemory:
    """Implements `workers.kernels.PeerMemory`, once the ranks have met."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Memory of this rank alone: signals, and the buffer. Raises RuntimeError."""
        group = dist.group.WORLD
        assert group is not None, "no process group"
        self._device = device
        self._group = group
        self._group_name: str = group.group_name
        # Not `symmetric.empty`, whose pool may hand out the middle of an allocation: the operators of some
        # versions count from its start.
        self._buffer = c10d._SymmetricMemory.empty_strided_p2p(
            (num_bytes,), (1,), torch.uint8, device, self._group_name
        )
        self._handle: c10d._SymmetricMemory | None = None

    @property
    def buffer(self) -> torch.Tensor:
        return self._buffer

    def meet(self) -> None:
        """Maps the memory of all ranks, which do this at the same time. Raises RuntimeError."""
        self._handle = symmetric.rendezvous(self._buffer, self._group)
        if self._handle is None or self._handle.world_size != dist.get_world_size():
            raise RuntimeError("torch has not mapped the memory of all ranks")
        self._pads = [self._pad(rank) for rank in range(self._handle.world_size)]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Kernels are loaded at their first use, which may wait for others: `release` has no time for that.
        like = torch.zeros_like(self._pads[0])
        let_go(like, [like], 0)
        torch.cuda.synchronize(self._device)

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._group_name, out)

    def two_shots(self, part: torch.Tensor) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._group_name)

    def release(self) -> None:
        """Lets kernels go that wait for a peer that is gone, now and for a while after; from any thread, once
        the group has failed: what they add up is no sum. They have no timeout of their own."""
        if self._handle is None:
            return
        deadline = time.monotonic() + _RELEASE_S
        with torch.cuda.stream(self._stream):
            while time.monotonic() < deadline:
                let_go(self._pads[self._handle.rank], self._pads, self._handle.rank)
                self._stream.synchronize()

    def _pad(self, rank: int) -> torch.Tensor:
        """Signals in the memory of a rank, (channels, ranks that set them)."""
        assert self._handle is not None, "meet() first"
        size = self._handle.world_size
        pad = self._handle.get_signal_pad(rank, (), torch.int32).view(-1)
        return pad[: len(pad) // size * size].view(-1, size)


def let_go(own: torch.Tensor, pads: list[torch.Tensor], rank: int) -> None:
    """Says once, in place of all peers, what a kernel of this rank may wait for. It makes its signal at each
    peer 1, for which it has to be 0, and then its own signals 0, for which they have to be 1.

    pads: the signals of all ranks, (channels, ranks); own: those of this one, among them.
    """
    own.fill_(1)
    for pad in pads:
        pad[:, rank].zero_()


def _uuid(index: int) -> str:
    try:
        return str(torch.cuda.get_device_properties(index).uuid)
    except AttributeError as error:
        raise RuntimeError(f"this torch does not tell which GPU it is: {error}") from error
