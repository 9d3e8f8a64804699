"""One rank of a group, from config to ready; used alike by Ray actors, by `launch` and by tests.

    leader = Leader(config)                      # opens rank 0's ports; a group of one rank opens none
    follower = Follower(config, 1, leader.rendezvous)   # in another process; likewise the ranks after it
    facts = leader.load()      ||  follower.load()   # follower.load(prepare): see there
    Engine(executor=leader.executor, ...)  ||  follower.follow()   # blocks until the group ends
    leader.close()             ->  follow() returns; follower.close()

The two `load` run at the same time: the ranks meet, compare what they found, form the process group, read
their slices of the weights, agree on the number of blocks, and compute a first step together.

Whatever breaks the group raises GroupFailed on rank 0 and LeaderLost elsewhere. A thread inside a collective
cannot raise, so a watchdog thread calls `exit_process` too, on rank 0 what it was given instead: that prints
the reason, leaves the process a second to report it, and ends it. So a process belongs to its rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch._C._distributed_c10d import TCPStore

from workers.config import GroupConfig
from workers.engine.meter import MeteredModel
from workers.engine.step import Executor, StepStarter
from workers.kernels import StepMessage, passes
from workers.model.decoder import Decoder
from workers.model.parallel import TensorParallel
from workers.ports import connect_store, open_port, open_store
from workers.runtime import shared_memory, shared_pool, symmetric_memory
from workers.runtime.agreement import (
    agree_on_files,
    agree_on_identity,
    agree_on_memory,
    are_same_files,
    collectives_of,
    memory_facts,
    num_blocks_of,
    num_ranks_here,
    num_sharers,
    shares_attention,
)
from workers.runtime.device import make_current
from workers.runtime.executor import GroupExecutor
from workers.runtime.first_step import compute_first_step
from workers.runtime.follower_link import FollowerLink
from workers.runtime.handshake import Facts, Rendezvous, new_token
from workers.runtime.leader_link import LeaderLink
from workers.runtime.peer_memory import TorchPeers
from workers.runtime.process_group import STORE_TIMEOUT_S, WARM_UP_TIMEOUT_S, ProcessGroup
from workers.runtime.rank_model import RankFacts, RankModel
from workers.runtime.runner import ModelRunner

EXIT_CODE = 70
JOIN_TIMEOUT_S = 120.0  # for all processes of a group to be there
LOAD_TIMEOUT_S = 1800.0  # for all ranks to have read their weights
_LAST_WORDS_S = 1.0

# From facts, memory of the KV pool and link to rank 0 of a rank above 0.
Prepare = Callable[[RankFacts, torch.Tensor, FollowerLink], Facts]

__all__ = ["EXIT_CODE", "Follower", "Leader", "Prepare", "RankFacts", "Rendezvous", "exit_process"]


def exit_process(reason: str) -> None:
    """The default `on_failure`: says why on stderr, ends the process whatever its threads are stuck in."""
    print(f"tandem: rank process {os.getpid()} ends: {reason}", file=sys.stderr, flush=True)
    time.sleep(_LAST_WORDS_S)  # the engine loop reports the failure to its clients meanwhile
    os._exit(EXIT_CODE)


class Leader:
    """Rank 0."""

    def __init__(
        self,
        config: GroupConfig,
        *,
        host: str = "127.0.0.1",
        on_failure: Callable[[str], None] = exit_process,
    ) -> None:
        """Opens the checkpoint, checks it against config and machine, and opens the ports.

        host: IPv4 address of this machine that the other ranks can reach. Raises what names a fault of config
        or checkpoint: RankConfigError, CheckpointError, TensorParallelError.
        """
        self._model = RankModel(config, rank=0)
        self._config = config
        self._host = host
        self._executor: GroupExecutor | None = None
        self._runner: ModelRunner | None = None
        self._rendezvous: Rendezvous | None = None
        self._link: LeaderLink | None = None
        self._group: ProcessGroup | None = None
        self._prepared: dict[int, Facts] = {}
        self._ranks_on_machine = 1
        self.is_symmetric = False  # whether the ranks add up in symmetric memory; known after `load`
        if config.parallel.tensor_parallel > 1:
            self._store = open_store(host, timeout_s=STORE_TIMEOUT_S)
            listener = open_port(host)
            self._rendezvous = Rendezvous(
                host=host,
                store_port=self._store.port,
                control_port=listener.getsockname()[1],
                token=new_token(),
            )
            self._link = LeaderLink(
                listener,
                self._rendezvous.token,
                world_size=config.parallel.tensor_parallel,
                timeout_s=config.parallel.step_timeout_s,
                on_failure=on_failure,
            )

    @property
    def rendezvous(self) -> Rendezvous:
        """What followers need. Only for tensor_parallel > 1."""
        assert self._rendezvous is not None, "a group of one rank has no followers"
        return self._rendezvous

    @property
    def failure(self) -> str | None:
        """Why the group ended by itself; None while it lives."""
        return self._link.failure if self._link is not None else None

    @property
    def prepared(self) -> Mapping[int, Facts]:
        """What the ranks above 0 have said of what they prepared; see `Follower.load`."""
        return self._prepared

    @property
    def pool(self) -> torch.Tensor:
        """Memory of this rank's KV pool, (num_blocks, block_bytes) uint8; valid as `executor`."""
        assert self._runner is not None, "load() first"
        return self._runner.pool.memory

    @property
    def link(self) -> LeaderLink | None:
        """To the other ranks, for orders beside the steps; None for a group of one."""
        return self._link

    @property
    def executor(self) -> Executor:
        """Valid from `load` to `close`; its own `close` is this leader's."""
        assert self._executor is not None, "load() first"
        return self._executor

    @property
    def starter(self) -> StepStarter | None:
        """To plan steps ahead; None: they are not. Valid as `executor`."""
        assert self._executor is not None, "load() first"
        return self._executor if self._model.plans_ahead else None

    def load(self, is_lost: Callable[[int], str | None] = lambda rank: None) -> RankFacts:
        """Brings the rank to the point where it serves.

        is_lost: says why a rank that is waited for will never come, if it will not. Raises GroupFailed, or
        PoolTooSmall or CheckpointError for what shows only now.
        """
        try:
            facts = self._load_alone() if self._link is None else self._load_group(self._link, is_lost)
            compute_first_step(self.executor)
        except Exception:
            self.close()
            raise
        return facts

    def metered(self) -> MeteredModel:
        """What counts in a step, and what the machines can do at most. After `load`, before the first
        request: measuring takes a fraction of a second."""
        return self._model.metered(self._ranks_on_machine)

    def close(self) -> None:
        """Ends the followers and leaves the process group. May be called twice."""
        if self._link is not None:
            self._link.close()
        self._model.close()  # its graphs hold the group's collectives
        if self._group is not None:
            self._group.close()

    def _load_alone(self) -> RankFacts:
        model = self._model
        decoder = model.load(TensorParallel(), ranks_on_machine=1)
        heads = model.draft_heads(decoder)
        num_blocks = model.measure_blocks(decoder, num_sharers=1)
        facts = model.facts(num_blocks)
        self._runner = model.runner(decoder, num_blocks)
        self._executor = GroupExecutor(
            self._runner, draft_model=model.draft_model(num_blocks), draft_heads=heads
        )
        return facts

    def _load_group(self, link: LeaderLink, is_lost: Callable[[int], str | None]) -> RankFacts:
        model = self._model
        agree = partial(link.agree, timeout_s=LOAD_TIMEOUT_S)
        link.accept(JOIN_TIMEOUT_S, is_lost)
        files = agree(model.files(), agree_on_files)
        identity = model.identity(same_files=are_same_files(files))
        agreed = agree(identity, agree_on_identity)
        num_here = self._ranks_on_machine = num_ranks_here(agreed)
        with link.limited("the first collective", WARM_UP_TIMEOUT_S):
            self._group = _process_group(
                self._config, 0, self._host, self._store, model.device, collectives_of(agreed)
            )
        parallel = self._group.parallel
        if self._group.interrupt is not None:
            link.interrupt_with(self._group.interrupt)
            link.limit_steps()
            with link.limited("the first sum in symmetric memory", WARM_UP_TIMEOUT_S):
                symmetric = symmetric_memory.settle(
                    _symmetric_place(self._config, 0, model, num_here), TorchPeers(model.device), agree
                )
            if symmetric is not None:
                link.interrupt_with(symmetric.abort)
                parallel = replace(parallel, symmetric=symmetric)
                self.is_symmetric = True
        if model.device.type == "cpu":
            shared = shared_memory.lead(_place(self._config, 0), num_here, agree)
            if shared is not None:
                link.interrupt_with(shared.abort)
                parallel = replace(parallel, shared=shared)
        decoder = model.load(parallel, num_here)
        heads = model.draft_heads(decoder)
        agree({}, lambda by_rank: {})  # then collectives need not wait long
        agree = partial(link.agree, timeout_s=WARM_UP_TIMEOUT_S)
        with link.limited("the warm-up", WARM_UP_TIMEOUT_S):
            measured = _measured(model, decoder, agreed)
        memory = agree(measured, agree_on_memory)
        num_blocks = num_blocks_of(memory)
        facts = model.facts(num_blocks)
        parts = None
        if shares_attention(memory):
            parts = shared_pool.share(0, model.part_forms(num_blocks), agree)
        with link.limited("making the KV pool and its graphs", WARM_UP_TIMEOUT_S):
            self._runner = model.runner(decoder, num_blocks, parts)
        agree({}, self._collect_prepared)
        self._executor = GroupExecutor(
            self._runner,
            link,
            on_close=self.close,
            draft_model=model.draft_model(num_blocks),
            draft_heads=heads,
        )
        return facts

    def _collect_prepared(self, by_rank: dict[int, Facts]) -> Facts:
        self._prepared = {rank: facts for rank, facts in by_rank.items() if rank != 0}
        return {}


class Follower:
    """A rank above 0. One per process: it ends the process when rank 0 is gone and no thread can say so."""

    def __init__(self, config: GroupConfig, rank: int, rendezvous: Rendezvous) -> None:
        """Starts nothing: `load` connects to rank 0."""
        self._config = config
        self._rank = rank
        self._rendezvous = rendezvous
        self._model: RankModel | None = None
        self._runner: ModelRunner | None = None
        self._group: ProcessGroup | None = None
        self._link: FollowerLink | None = None

    def load(self, prepare: Prepare | None = None) -> None:
        """As `Leader.load`; raises LeaderLost where that raises GroupFailed.

        prepare: makes what this rank has beside the model; rank 0 is told what it returns. Waits for rank 0
        to be in its own `load`. An error of this rank is told to rank 0 before it is raised.
        """
        self._link = FollowerLink(
            self._rendezvous,
            self._rank,
            timeout_s=self._config.parallel.step_timeout_s,
            join_timeout_s=JOIN_TIMEOUT_S,
            on_leader_lost=exit_process,
        )
        try:
            self._load(self._link, prepare or _nothing)
        except Exception as error:
            self._link.report_fault(f"{type(error).__name__}: {error}")
            self.close()
            raise

    def follow(self) -> None:
        """Computes steps until rank 0 ends the group. Raises LeaderLost when rank 0 is gone or refuses.

        Any other exception is a fault of this rank and is told to rank 0 before it is raised.
        """
        assert self._link is not None and self._runner is not None and self._model is not None, "load() first"
        make_current(self._model.device)  # of this thread, which need not be that of `load`
        for body in self._link.steps():
            try:
                for part in passes(StepMessage(body)):
                    self._runner.run(part)
            except Exception as error:
                self._link.report_fault(f"{type(error).__name__}: {error}")
                raise

    def close(self) -> None:
        """Leaves the group. May be called twice."""
        if self._link is not None:
            self._link.close()
        if self._model is not None:
            self._model.close()  # its graphs hold the group's collectives
        if self._group is not None:
            self._group.close()

    def _load(self, link: FollowerLink, prepare: Prepare) -> None:
        model = self._model = RankModel(self._config, self._rank)
        agree = partial(link.agree, timeout_s=LOAD_TIMEOUT_S)
        files = agree(model.files())
        identity = model.identity(same_files=are_same_files(files))
        agreed = agree(identity)
        num_here = num_ranks_here(agreed)
        meeting = self._rendezvous
        store = connect_store(meeting.host, meeting.store_port, timeout_s=STORE_TIMEOUT_S)
        self._group = _process_group(
            self._config, self._rank, link.own_address, store, model.device, collectives_of(agreed)
        )
        parallel = self._group.parallel
        if self._group.interrupt is not None:
            link.interrupt_with(self._group.interrupt)
            symmetric = symmetric_memory.settle(
                _symmetric_place(self._config, self._rank, model, num_here),
                TorchPeers(model.device),
                lambda facts, _decide: agree(facts),
            )
            if symmetric is not None:
                link.interrupt_with(symmetric.abort)
                parallel = replace(parallel, symmetric=symmetric)
        if model.device.type == "cpu":
            shared = shared_memory.follow(_place(self._config, self._rank), num_here, agree)
            if shared is not None:
                link.interrupt_with(shared.abort)
                parallel = replace(parallel, shared=shared)
        decoder = model.load(parallel, num_here)
        agree({})
        memory = agree(_measured(model, decoder, agreed))
        num_blocks = num_blocks_of(memory)
        parts = None
        if shares_attention(memory):
            forms = model.part_forms(num_blocks)
            parts = shared_pool.share(self._rank, forms, lambda facts, _decide: agree(facts))
        self._runner = model.runner(decoder, num_blocks, parts)
        prepared = prepare(model.facts(num_blocks), self._runner.pool.memory, link)
        agree(prepared)


def _nothing(_facts: RankFacts, _pool: torch.Tensor, _link: FollowerLink) -> Facts:
    return {}


def _measured(model: RankModel, decoder: Decoder, agreed: Facts) -> Facts:
    """agreed: the answer of `agree_on_identity`."""
    num_blocks = model.measure_blocks(decoder, num_sharers(agreed, model.device))
    return memory_facts(num_blocks, shares_attention=decoder.shares_attention)


def _place(config: GroupConfig, rank: int) -> shared_memory.Place:
    parallel = config.parallel
    return shared_memory.Place(rank=rank, size=parallel.tensor_parallel, timeout_s=parallel.step_timeout_s)


def _symmetric_place(
    config: GroupConfig, rank: int, model: RankModel, num_here: int
) -> symmetric_memory.Place:
    size, objection = config.parallel.tensor_parallel, ""
    if num_here < size:
        objection = "the ranks are on several machines"
    elif not config.parallel.symmetric_memory:
        objection = "parallel.symmetric_memory is false"
    return symmetric_memory.Place(
        rank=rank, size=size, message_bytes=model.decode_message_bytes, objection=objection
    )


def _process_group(
    config: GroupConfig,
    rank: int,
    own_address: str,
    store: TCPStore,
    device: torch.device,
    backend: str,
) -> ProcessGroup:
    return ProcessGroup(
        store,
        host=own_address,
        rank=rank,
        size=config.parallel.tensor_parallel,
        device=device,
        backend=backend,
        timeout_s=config.parallel.step_timeout_s,
    )
