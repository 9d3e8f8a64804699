"""A step without logits ends on rank 0 when every rank has written its keys and values, the last layer's too:
from then on other groups may read the blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.models.checkpoints import prompt_ids
from workers.kernels import CacheForm, PagedCache, SharedCollective, TorchKernels, pack_step
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import Decoder, load_decoder
from workers.model.parallel import TensorParallel

WAIT_S = 20.0
NUM_TOKENS, BLOCK_SIZE = 20, 16


class Sums:
    """What two ranks, threads of this process, add up."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=WAIT_S)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * 2
        self.num_entered = [0, 0]

    def add(self, rank: int, x: torch.Tensor) -> None:
        self.num_entered[rank] += 1
        self._parts[rank] = x
        self._barrier.wait()
        total = self._parts[0] + self._parts[1]
        self._barrier.wait()
        x.copy_(total)


@dataclass
class End:
    """One rank's end; stands in for `SharedCollective`."""

    sums: Sums
    rank: int

    def all_reduce(self, x: torch.Tensor) -> None:
        self.sums.add(self.rank, x)

    def join(self, nodes: torch.Tensor, *_: object) -> torch.Tensor:
        total = nodes.sum(0)
        self.sums.add(self.rank, total)
        return total


@dataclass
class SlowKernels(TorchKernels):
    """Waits to be let on before the keys of the last layer are written."""

    num_layers: int
    may_go_on: threading.Event = field(default_factory=threading.Event)
    num_written: int = 0

    def rotary_and_write(self, *arguments: Any) -> torch.Tensor:
        if self.num_written == self.num_layers - 1:
            assert self.may_go_on.wait(WAIT_S)
        self.num_written += 1
        return super().rotary_and_write(*arguments)


class Careless(Decoder):
    """Does not wait for the other ranks."""

    def meet(self, device: torch.device) -> None:
        pass


class Rank:
    """A decoder over a pool, which computes one step in a thread."""

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        form = CacheForm(
            num_kv_heads=decoder.num_kv_heads,
            num_layers=spec.num_layers,
            block_size=BLOCK_SIZE,
            head_dim=spec.head_dim,
            dtype=torch.float32,
        )
        self.pool = PagedCache.zeros(2, form)
        self.failure: BaseException | None = None
        self._decoder = decoder
        self._thread = threading.Thread(target=self._compute, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(WAIT_S)
        assert self.is_done and self.failure is None, self.failure

    def has_written(self, layer: int) -> bool:
        """The keys of all tokens."""
        rows = self.pool.layers[layer].keys.transpose(1, 2).reshape(2 * BLOCK_SIZE, -1)
        return bool(rows[:NUM_TOKENS].any(1).all())

    def _compute(self) -> None:
        message = pack_step(
            lens=[NUM_TOKENS],
            starts=[0],
            block_counts=[2],
            token_ids=prompt_ids(NUM_TOKENS),
            blocks=[0, 1],
            logit_rows=[],
            zero_blocks=[],
        )
        try:
            self._decoder.forward(message, self.pool)
        except BaseException as failure:
            self.failure = failure


def rank_0_is_done_first(folder: Path, kind: type[Decoder]) -> bool:
    """Whether rank 0 ends its step while rank 1 has the last layer still to write."""
    checkpoint = Checkpoint(folder)
    num_layers = checkpoint.spec.num_layers
    sums, slow = Sums(), SlowKernels(num_layers)
    ranks = []
    for rank, kernels in enumerate((TorchKernels(), slow)):
        parallel = TensorParallel(rank, 2, cast(SharedCollective, End(sums, rank)))
        decoder = load_decoder(checkpoint, torch.float32, torch.device("cpu"), parallel, kernels)
        decoder.__class__ = kind
        ranks.append(Rank(decoder))
    for rank in ranks:
        rank.start()
    # One sum for the embedding, two in every layer but the last, and the meeting.
    wait_until(lambda: ranks[0].is_done or sums.num_entered[0] == 1 + 2 * (num_layers - 1) + 1)
    is_done_first = ranks[0].is_done
    assert ranks[0].has_written(num_layers - 1)
    wait_until(lambda: slow.num_written == num_layers - 1)
    assert not ranks[1].has_written(num_layers - 1)
    slow.may_go_on.set()
    for rank in ranks:
        rank.end()
        assert all(rank.has_written(layer) for layer in range(num_layers))
    return is_done_first


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(("kind", "is_done_first"), [(Decoder, False), (Careless, True)])
def test_rank_0_waits_for_the_last_layer_of_all(
    family_folder: Callable[[str], Path], kind: type[Decoder], is_done_first: bool
) -> None:
    """And without the meeting it does not, which this test has to notice."""
    assert rank_0_is_done_first(family_folder("llama"), kind) is is_done_first
