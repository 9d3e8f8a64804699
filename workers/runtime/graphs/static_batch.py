"""The tensors of decode steps at fixed addresses: on the host, and their twins on the device.

One buffer holds all of them, so a step is brought to the device by one copy:

    int64 (max_rows,)   token ids | positions | slots | logit rows
    int32               query starts (max_rows + 1,) | context lengths (max_rows,) | block tables

Block tables come last, (rows, width) of the step's own key and dense: nothing behind them is copied. Padding
rows are sequences of one token whose slot is -1, so that they write nothing; they read the first row of
block 0, and nobody reads what becomes of it.
"""

from __future__ import annotations

import torch

from workers.kernels import StepBatch
from workers.runtime.graphs.buckets import GraphKey
from workers.runtime.graphs.device import GraphDevice

_LONG, _INT = 8, 4  # bytes


class _Views:
    """The parts of one buffer."""

    def __init__(self, buffer: torch.Tensor, max_rows: int) -> None:
        longs = buffer[: 4 * max_rows * _LONG].view(torch.int64)
        ints = buffer[4 * max_rows * _LONG :].view(torch.int32)
        self.token_ids, self.positions, self.slots, self.logit_rows = longs.view(4, max_rows).unbind()
        self.query_starts = ints[: max_rows + 1]
        self.context_lens = ints[max_rows + 1 : 2 * max_rows + 1]
        self.tables = ints[2 * max_rows + 1 :]


class StaticBatch:
    """Used by one thread."""

    def __init__(
        self,
        graph_device: GraphDevice,
        device: torch.device,
        *,
        max_rows: int,
        max_context: int,
        block_size: int,
    ) -> None:
        self._graph_device = graph_device
        self._block_size = block_size
        num_ints = 2 * max_rows + 1 + max_rows * self._width(max_context)
        self._tables_at = 4 * max_rows * _LONG + (2 * max_rows + 1) * _INT
        num_bytes = 4 * max_rows * _LONG + num_ints * _INT
        self._host = graph_device.host_memory(num_bytes)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._on_host = _Views(self._host, max_rows)
        self._on_device = _Views(self._target, max_rows)
        rows = torch.arange(max_rows + 1)
        self._on_host.logit_rows.copy_(rows[:-1])
        self._on_host.query_starts.copy_(rows)  # a row is a sequence, in every step

    def batch(self, key: GraphKey) -> StepBatch:
        """What a graph reads: the same tensors in every step."""
        return self._cut(self._on_device, key)

    def fill(self, key: GraphKey, step: StepBatch) -> None:
        """Has the device's tensors hold `step`, of at most key.rows sequences of one token each, on the host;
        whatever is started later finds them so."""
        self._graph_device.await_upload()
        views, rows = self._cut(self._on_host, key), step.token_ids.shape[0]
        for target, source, padding in (
            (views.token_ids, step.token_ids, 0),
            (views.positions, step.positions, 0),
            (views.slots, step.slots, -1),
            (views.context_lens, step.context_lens, 1),
        ):
            target[:rows] = source
            target[rows:] = padding
        width = step.block_tables.shape[1]
        views.block_tables[:rows, :width] = step.block_tables
        views.block_tables[:rows, width:] = 0
        views.block_tables[rows:] = 0
        used = self._tables_at + views.block_tables.nbytes
        self._graph_device.upload(self._host[:used], self._target[:used])

    def _cut(self, views: _Views, key: GraphKey) -> StepBatch:
        rows, width = key.rows, self._width(key.context)
        return StepBatch(
            token_ids=views.token_ids[:rows],
            positions=views.positions[:rows],
            slots=views.slots[:rows],
            query_starts=views.query_starts[: rows + 1],
            context_lens=views.context_lens[:rows],
            block_tables=views.tables[: rows * width].view(rows, width),
            logit_rows=views.logit_rows[:rows],
            max_context_len=key.context,
        )

    def _width(self, context: int) -> int:
        return -(-context // self._block_size)
