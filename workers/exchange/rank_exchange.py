"""What a rank's process has to exchange KV blocks with other groups, beside its engine and model.

Every rank has an agent, which gives out the bytes of its pool and copies those of others into it. Rank 0 also
talks with other groups about which: `peers` reads, `lease_server` lends.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

import numpy as np
import torch

from workers.data_plane.channel import ClientIdentity
from workers.data_plane.lease_server import LeaseServer
from workers.data_plane.wire import KVPool
from workers.engine.exchange import ExchangeSetup
from workers.engine.loop import EngineLoop
from workers.exchange.group_peers import GroupPeers
from workers.exchange.rank_pulls import FollowerPulls, RankPulls
from workers.group_start import GroupStart
from workers.runtime.agreement import machine_id
from workers.runtime.follower_link import FollowerLink
from workers.runtime.handshake import Facts
from workers.runtime.leader_link import LeaderLink
from workers.runtime.rank import RankFacts
from workers.transfer.agent import Agent
from workers.transfer.choice import TRANSPORTS
from workers.transfer.layout import KVLayout
from workers.transfer.link import Endpoint
from workers.transfer.puller import TransferSettings

_GENERATION_BITS: Final = 48  # of the first generation, drawn at random; counting on overflows nothing


class ExchangeImpossible(Exception):
    """This group neither reads nor lends blocks, and why."""


class LeaderExchange:
    """Rank 0's part. `load` it with the engine; `start`, `disconnect`, `close` belong to the asyncio loop."""

    def __init__(
        self, start: GroupStart, facts: RankFacts, prepared: Mapping[int, Facts], link: LeaderLink | None
    ) -> None:
        """prepared: what the other ranks' FollowerExchange has said. link: to them, if there are any.

        Raises ExchangeImpossible.
        """
        if not start.config.transfer.enabled:
            raise ExchangeImpossible("transfer.enabled is false")
        if not (start.config.cache.prefix_reuse and facts.limits.is_prefix_reusable):
            raise ExchangeImpossible("its finished blocks are not kept for others (no prefix reuse)")
        self._start = start
        self._link = link
        self._layout = layout_of(facts)
        self._others = [_endpoint(rank, prepared) for rank in range(1, facts.tensor_parallel)]
        self._agent: Agent | None = None
        identity = ClientIdentity(client_id=f"reader-{start.group_id}", secret=start.secret, subscribes=False)
        transfer = start.config.transfer
        self.peers = GroupPeers(identity=identity, layout=self._layout, transfer=transfer)
        self.lease_server = LeaseServer(heartbeat_s=transfer.heartbeat_s)
        self.setup = ExchangeSetup(
            peers=self.peers,
            on_offer=self.lease_server.on_offer,
            transfer=transfer,
            first_generation=secrets.randbits(_GENERATION_BITS),
        )

    def load(self, pool: torch.Tensor, generations: memoryview, host: str) -> None:
        """Starts this rank's agent. generations: of the engine, live.

        Raises ExchangeImpossible, as when the agent cannot listen.
        """
        try:
            self._agent = Agent(
                pool=pool,
                layout=self._layout,
                rank=0,
                generations=np.frombuffer(generations, dtype=np.int64),
                host=host,
                settings=settings_of(self._start),
            )
        except (OSError, ValueError) as error:
            raise ExchangeImpossible(f"rank 0 gives out no blocks: {error}") from error

    def start(self, engine_loop: EngineLoop) -> None:
        """From now on others may read, and the engine may have blocks read. Before its thread runs."""
        agent, link = self._agent, self._link
        assert agent is not None, "load() first"
        pulls = RankPulls(
            agent,
            num_ranks=self._layout.tensor_parallel,
            send_order=link.send_order if link is not None else _nobody,
            on_end=engine_loop.exchange,
        )
        if link is not None:
            link.hear_reports(pulls.on_report)
        self.peers.start(pulls, engine_loop.exchange)
        endpoints = tuple((host, port) for host, port in (agent.endpoint, *self._others))
        self.lease_server.open(KVPool(layout=asdict(self._layout), endpoints=endpoints), engine_loop)

    async def disconnect(self) -> None:
        """Asks other groups for nothing any more. May be called twice."""
        await self.peers.stop()

    async def close(self) -> None:
        """Once the engine has ended: no byte is read or written any more. May be called twice."""
        if self._agent is not None:
            await asyncio.to_thread(self._agent.close)


class FollowerExchange:
    """The part of a rank above 0."""

    def __init__(self, start: GroupStart, rank: int) -> None:
        self._start = start
        self._rank = rank
        self._agent: Agent | None = None

    def prepare(self, facts: RankFacts, pool: torch.Tensor, link: FollowerLink) -> Facts:
        """Starts the agent; what rank 0 needs to know of it. See `Follower.load`."""
        if not self._start.config.transfer.enabled:
            return {}
        try:
            self._agent = Agent(
                pool=pool,
                layout=layout_of(facts),
                rank=self._rank,
                generations=None,
                host=link.own_address,
                settings=settings_of(self._start),
            )
        except (OSError, ValueError) as error:  # the group can do without
            return {"problem": str(error)}
        link.take_orders(FollowerPulls(self._agent, link.report).on_order)
        return {"host": self._agent.endpoint.host, "port": self._agent.endpoint.port}

    def close(self) -> None:
        """No byte is read or written any more. May be called twice."""
        if self._agent is not None:
            self._agent.close()


def layout_of(facts: RankFacts) -> KVLayout:
    """What a block of this group is."""
    return KVLayout(
        model_hash=facts.model_hash,
        code=facts.code,
        dtype=facts.dtype,
        kv_dtype=facts.kv_dtype,
        block_size=facts.block_size,
        num_kv_heads=facts.num_kv_heads,
        num_layers=facts.num_layers,
        head_dim=facts.head_dim,
        tensor_parallel=facts.tensor_parallel,
    )


def settings_of(start: GroupStart) -> TransferSettings:
    """How a rank of this group moves bytes."""
    transfer = start.config.transfer
    return TransferSettings(
        secret=start.secret,
        machine=machine_id(),
        transports=TRANSPORTS if transfer.transport == "auto" else (transfer.transport,),
        timeout_s=transfer.timeout_s,
    )


def _endpoint(rank: int, prepared: Mapping[int, Facts]) -> Endpoint:
    """Raises ExchangeImpossible for a rank that has no agent."""
    facts = prepared.get(rank, {})
    host, port = facts.get("host"), facts.get("port")
    if not (isinstance(host, str) and isinstance(port, int)):
        raise ExchangeImpossible(f"rank {rank} gives out no blocks: {facts.get('problem', 'not prepared')}")
    return Endpoint(host, port)


def _nobody(_order: bytes) -> None:
    """There are no ranks above 0."""
