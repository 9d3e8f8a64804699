"""The ids that a step draws: kept on the device for the step after it, and on their way to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

from workers.kernels import MAX_LOGIT_ROWS


class ArrivingIds(NamedTuple):
    """A copy of ids to the host that has begun."""

    ids: torch.Tensor  # (R,) int64 on the host
    arrival: torch.cuda.Event | None  # None: they are there

    def wait(self) -> list[int]:
        """The ids; waits for the step that draws them, and for nothing that was started after it."""
        if self.arrival is not None:
            self.arrival.synchronize()
        ids: list[int] = self.ids.tolist()
        return ids


class DrawnIds:
    """Of one rank; of several, rank 0's are the ones that count."""

    def __init__(self, device: torch.device) -> None:
        # (MAX_LOGIT_ROWS,) int64 by row of logits: of the step that was started last.
        self.on_device = torch.zeros(MAX_LOGIT_ROWS, dtype=torch.int64, device=device)

    def keep(self, ids: torch.Tensor) -> ArrivingIds:
        """Keeps the ids (R,) of a step, and begins to bring them to the host."""
        assert len(ids) <= MAX_LOGIT_ROWS, f"a step of {len(ids)} rows cannot be planned ahead"
        self.on_device[: len(ids)] = ids
        if not ids.is_cuda:
            return ArrivingIds(ids, None)
        # Copies to pinned memory are not waited for. torch gives it to another only when this one is done.
        host = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)
        host.copy_(ids, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
        return ArrivingIds(host, arrival)
