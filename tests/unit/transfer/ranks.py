"""Ranks of small groups for tests: pools, agents over them, pulls that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from queue import Queue

import numpy as np
import torch

from workers.kernels import KernelsUnavailable, Library, load_library
from workers.transfer.agent import Agent
from workers.transfer.choice import TRANSPORTS
from workers.transfer.layout import KVLayout
from workers.transfer.puller import Order, SourceGroup, TransferSettings, source_group
from workers.transfer.transport import TransferFailed
from workers.types import BlockRead

SECRET = b"the secret of an application"
MACHINE = "this machine"
PATIENCE_S = 20.0
Load = Callable[[], Library]


@cache
def compiled() -> Library:
    """What ranks have for sockets here."""
    return load_library()


def no_compiler() -> Library:
    """What they have elsewhere."""
    raise KernelsUnavailable("no C++ compiler found")


def settings(
    *,
    transports: tuple[str, ...] = TRANSPORTS,
    secret: bytes = SECRET,
    machine: str = MACHINE,
    timeout_s: float = PATIENCE_S,
) -> TransferSettings:
    return TransferSettings(secret=secret, machine=machine, transports=transports, timeout_s=timeout_s)


class Rank:
    """A rank with a pool in host memory and an agent."""

    def __init__(
        self,
        of: KVLayout,
        rank: int,
        *,
        num_blocks: int,
        using: TransferSettings | None = None,
        load: Load = compiled,
    ) -> None:
        shape = (num_blocks, len(of.heads_of(rank)), of.num_layers, 2, of.block_size, of.head_dim)
        self.layout, self.rank = of, rank
        self.pool = torch.zeros(shape, dtype=getattr(torch, of.dtype))
        self.generations = np.zeros(num_blocks, dtype=np.int64) if rank == 0 else None
        self.agent = Agent(
            pool=self.pool,
            layout=of,
            rank=rank,
            generations=self.generations,
            host="127.0.0.1",
            settings=using or settings(),
            load=load,
        )

    def fill(self, blocks: torch.Tensor) -> None:
        """blocks: (num_blocks, all kv heads, layers, 2, block_size, head_dim)."""
        heads = self.layout.heads_of(self.rank)
        self.pool.copy_(blocks[:, heads.start : heads.stop])


@contextmanager
def group(
    of: KVLayout, *, num_blocks: int = 8, using: TransferSettings | None = None, load: Load = compiled
) -> Iterator[list[Rank]]:
    """All ranks of a group in this process."""
    ranks = [
        Rank(of, rank, num_blocks=num_blocks, using=using, load=load) for rank in range(of.tensor_parallel)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.agent.close()


def source_of(ranks: Sequence[Rank]) -> SourceGroup:
    return source_group(ranks[0].layout, [rank.agent.endpoint for rank in ranks])


def content(of: KVLayout, num_blocks: int, seed: int = 0) -> torch.Tensor:
    """Random blocks over all heads."""
    shape = (num_blocks, of.num_kv_heads, of.num_layers, 2, of.block_size, of.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(getattr(torch, of.dtype))


def pairs(blocks: Sequence[tuple[int, int]], generation: int = 0) -> tuple[BlockRead, ...]:
    """(source, own) -> what to read."""
    return tuple(BlockRead(source, generation, own) for source, own in blocks)


class Pull:
    """An order under way."""

    def __init__(
        self, agent: Agent, source: SourceGroup, blocks: Sequence[BlockRead], pull_id: int = 1
    ) -> None:
        self._ends: Queue[tuple[int, TransferFailed | None]] = Queue()
        self._pull_id = pull_id
        agent.pull(source, Order(pull_id, tuple(blocks), lambda *end: self._ends.put(end)))

    def error(self) -> TransferFailed | None:
        """Waits for the end."""
        pull_id, error = self._ends.get(timeout=2 * PATIENCE_S)
        assert pull_id == self._pull_id and self._ends.empty()
        return error


def pull(agent: Agent, source: SourceGroup, blocks: Sequence[BlockRead]) -> TransferFailed | None:
    """Fetches and waits."""
    return Pull(agent, source, blocks).error()
