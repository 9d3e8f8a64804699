"""A decoder whose decode steps are replayed.

    record()          -> a graph for each key, before the first request
    forward(message)  -> a step of decode rows alone: fill the tensors, replay, draw
                         any other step: operator by operator, as without graphs

The bits are those of the single operators: kernels compute a row without regard to the others. What waits for
the device is the copy of the drawn ids alone. All ranks of a group record the same graphs in the same order,
with their collectives inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from workers.kernels import (
    Draw,
    Drawn,
    Kernels,
    PagedCache,
    StepBatch,
    StepMessage,
    build_batch,
    fill_ids,
    header_of,
    unpack,
)
from workers.model.decoder import Decoder
from workers.runtime.graphs.buckets import Buckets, GraphKey
from workers.runtime.graphs.device import Graph, GraphDevice
from workers.runtime.graphs.static_batch import StaticBatch

_HOST = torch.device("cpu")


class GraphedDecoder:
    """Over one KV pool, whose address the graphs hold."""

    def __init__(
        self, decoder: Decoder, pool: PagedCache, buckets: Buckets, graph_device: GraphDevice
    ) -> None:
        """pool: as for `Decoder.forward`."""
        self._decoder = decoder
        self._pool = pool
        self._num_blocks, self._block_size = pool.num_blocks, pool.block_size
        self._buckets = buckets
        self._device = graph_device
        self._batch = StaticBatch(
            graph_device,
            pool.device,
            max_rows=buckets.rows[-1],
            max_context=buckets.contexts[-1],
            block_size=self._block_size,
        )
        self._graphs: dict[GraphKey, Graph] = {}
        # Where graphs leave what they find: memory of their own would be as much for each.
        self._logits: torch.Tensor | None = None  # (most rows, vocabulary) float32; None: not on this rank
        self._hidden: torch.Tensor | None = None  # (most rows, hidden)

    @property
    def kernels(self) -> Kernels:
        return self._decoder.kernels

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def record(self, keys: Sequence[GraphKey] | None = None) -> None:
        """keys: None for all. Writes nothing to the pool."""
        for key in self._buckets.keys() if keys is None else keys:
            self._batch.fill(key, _no_rows())
            if not self._graphs:
                self._take_outputs(key)
            self._graphs[key] = self._device.record(partial(self._run, key))

    def close(self) -> None:
        """Frees the graphs: NCCL does not let a rank leave while one holds its collectives. May be called
        twice; steps run by operator then."""
        while self._graphs:
            self._graphs.popitem()[1].reset()

    def share(self, x: torch.Tensor) -> None:
        self._decoder.share(x)

    def meet(self, device: torch.device) -> None:
        self._decoder.meet(device)

    def forward(
        self,
        message: StepMessage,
        kv: PagedCache,
        draws: Sequence[Draw] = (),
        drawn: torch.Tensor | None = None,
        *,
        ids_only: bool = False,
    ) -> Drawn | None:
        """As `Decoder.forward`; kv: the pool that the graphs are of."""
        key = self._key_of(message)
        if key is None or key not in self._graphs:
            return self._decoder.forward(message, kv, draws, drawn, ids_only=ids_only)
        assert kv is self._pool, "the graphs are of another pool"
        arrays = unpack(message)
        rows = len(arrays.token_ids)
        if len(arrays.lengths) or not np.array_equal(arrays.logit_rows, np.arange(rows)):
            return self._decoder.forward(message, kv, draws, drawn, ids_only=ids_only)
        step = build_batch(
            arrays,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            vocab_size=self._decoder.spec.vocab_size,
            device=_HOST,
            num_drawn=0 if drawn is None else len(drawn),
        )
        self._batch.fill(key, step)
        if drawn is not None:
            fill_ids(self._batch.batch(key).token_ids, drawn)
        self._graphs[key].replay()
        if self._logits is None or self._hidden is None:
            return None
        return self._decoder.draw(self._logits[:rows], self._hidden[:rows], draws)

    def _key_of(self, message: StepMessage) -> GraphKey | None:
        header = header_of(message)
        if header.num_parents or not header.num_slices == header.num_tokens == header.num_logit_rows:
            return None
        return self._buckets.key_of(header.num_tokens, header.longest_context)

    def _run(self, key: GraphKey) -> None:
        logits, hidden = self._decoder.run_batch(self._batch.batch(key), self._pool)
        if self._logits is not None and self._hidden is not None:
            assert logits is not None and hidden is not None, "rank 0 gets the logits"
            self._logits[: key.rows] = logits
            self._hidden[: key.rows] = hidden

    def _take_outputs(self, key: GraphKey) -> None:
        """Memory for what the largest graph finds; a run says its shapes."""
        logits, hidden = self._decoder.run_batch(self._batch.batch(key), self._pool)
        if logits is not None and hidden is not None:
            self._logits, self._hidden = torch.empty_like(logits), torch.empty_like(hidden)


def _no_rows() -> StepBatch:
    """A step of padding alone."""
    none, ints = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    return StepBatch(
        token_ids=none,
        positions=none,
        slots=none,
        query_starts=torch.zeros(1, dtype=torch.int32),
        context_lens=ints,
        block_tables=ints.view(0, 1),
        logit_rows=none,
        max_context_len=0,
    )
