"""What graphs need of a device, and CUDA's way of it: the one file of this room that calls CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Work that was recorded once."""

    def replay(self) -> None:
        """Starts it again, on the same memory. Returns before it is done."""
        ...

    def reset(self) -> None:
        """Frees what it holds; it cannot be replayed any more."""
        ...


class GraphDevice(Protocol):
    """A device that can record what is started on it."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8 on the host, from which copies to the device need not be waited for."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Starts a copy of host memory; whatever is started later finds it done."""
        ...

    def await_upload(self) -> None:
        """Returns when the source of the last `upload` may be written again."""
        ...

    def record(self, work: Callable[[], None]) -> Graph:
        """The work as a graph. Also runs it, once or more."""
        ...

    def taken_bytes(self) -> int:
        """Memory of the device that is not free now, whoever has it."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Most memory that this process has while it runs the work, beyond what it has before."""
        ...


class CudaDevice:
    """Implements GraphDevice. The graphs of one share memory: those of another decoder need another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()  # of all graphs: one runs at a time
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self._uploaded.record()

    def await_upload(self) -> None:
        self._uploaded.synchronize()

    def record(self, work: Callable[[], None]) -> Graph:
        """Triton compiles, and libraries take their memory, in a run before the one that is recorded."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            work()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of transfers go on with calls of their own: they are not part of the recording.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph

    def taken_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """By what the allocator holds from the driver: pieces too small to be used again count, too."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device) - before
        torch.cuda.empty_cache()
        return peak
