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
    """Implements `workers.runtime.graphs.device.GraphDevice`. Host memory that is being uploaded must not be
    written before it has been waited for: it is compared then."""

    graphs: list[EmulatedGraph] = field(default_factory=list)
    taken: int = 0  # bytes that the next graphs take are added here by tests
    graph_bytes: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    num_uploads: int = 0
    uploaded_bytes: int = 0
    _uploading: tuple[torch.Tensor, torch.Tensor] | None = None  # memory, and what was in it

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert self._uploading is None, "the last upload may still be reading"
        self._uploading = source, source.clone()
        self.num_uploads += 1
        self.uploaded_bytes = source.nbytes
        target.copy_(source)

    def await_upload(self) -> None:
        if self._uploading is not None:
            memory, before = self._uploading
            assert torch.equal(memory, before), "written while an upload may still be reading"
            self._uploading = None

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
