"""A device for graphs on the CPU: what is recorded runs again at each replay, over the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class EmulatedGraph:
    work: Callable[[], None]
    num_replays: int = 0
    is_freed: bool = False

    def replay(self) -> None:
        assert not self.is_freed
        self.num_replays += 1
        self.work()

    def reset(self) -> None:
        self.is_freed = True


@dataclass
class EmulatedDevice:
    """Implements `workers.runtime.graphs.device.GraphDevice`. Host memory that has been uploaded must not be
    written before it has been waited for: until then it is filled with noise."""

    graphs: list[EmulatedGraph] = field(default_factory=list)
    taken: int = 0  # bytes that the next graphs take are added here by tests
    graph_bytes: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    num_uploads: int = 0
    uploaded_bytes: int = 0
    _is_waited_for: bool = True

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert self._is_waited_for, "the last upload may still be reading"
        self._is_waited_for = False
        self.num_uploads += 1
        self.uploaded_bytes = source.nbytes
        target.copy_(source)

    def await_upload(self) -> None:
        self._is_waited_for = True

    def record(self, work: Callable[[], None]) -> EmulatedGraph:
        work()
        self.graphs.append(EmulatedGraph(work))
        if self.graph_bytes:
            self.taken += self.graph_bytes.pop(0)
        return self.graphs[-1]

    def taken_bytes(self) -> int:
        return self.taken

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return self.peaks.pop(0) if self.peaks else 0
