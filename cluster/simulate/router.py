"""One router replica in virtual time: the real placement, prefix index and load tracking.

    arrive    rank the groups, charge the choice, hand the request over; a prefill group begins at once, when
              the choice has one
    on_chunk  first token: the charge ends, what was read from other groups is counted; end: the request is
              over

Handing over takes no time and always succeeds: no group dies here. What `router.dispatch` does with tasks and
sockets around the same placement is done here by events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.figures.traces import TraceRequest, prompt_tokens
from cluster.simulate.group import SimGroup
from cluster.simulate.rivals import Rival
from cluster.simulate.world import World
from router.dispatch.interface import Decision
from router.dispatch.placement import BlockChains, Placement
from router.routing.policy import Choice, PolicyConfig
from router.routing.prefix_index import PrefixIndex
from workers.engine.exchange import Redirect
from workers.hashing import block_hashes
from workers.types import (
    BlockEvent,
    GenerateRequest,
    GroupId,
    GroupStats,
    KVSource,
    RequestId,
    Role,
    SamplingParams,
    TokenChunk,
)

_MAX_DECISIONS = 16  # nobody asks here


@dataclass(slots=True)
class Served:
    """What became of a request. Times are seconds since the beginning."""

    request: TraceRequest
    arrival_s: float
    group_id: GroupId
    first_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, that some group had before
    refusal: str | None = None


@dataclass(slots=True)
class _Live:
    """A request at a group."""

    served: Served
    request_id: RequestId
    group: SimGroup
    decision: Decision
    chains: BlockChains
    source: SimGroup | None = None
    source_cached_tokens: int = 0
    is_readable: bool = False  # the source has all blocks


class SimRouter:
    """Implements `group.OutputListener`."""

    def __init__(
        self,
        world: World,
        *,
        policy: PolicyConfig,
        rival: Rival | None = None,
        vocab_size: int,
        stopwatch: Callable[[], float] = time.thread_time,
    ) -> None:
        """rival: places instead of our policy, which then only counts."""
        self.index = PrefixIndex(clock=world.clock)
        self.decision_s: list[float] = []  # CPU time that each choice took
        self.results: list[Served] = []
        self.pulled_tokens = 0
        self._world = world
        self._rival = rival
        self._vocab_size = vocab_size
        self._stopwatch = stopwatch
        self._placement = Placement(
            index=self.index, policy=policy, clock=world.clock, max_decisions=_MAX_DECISIONS
        )
        self._answering: dict[GroupId, SimGroup] = {}
        self._prefilling: dict[GroupId, SimGroup] = {}
        self._live: dict[RequestId, _Live] = {}
        self._prompts: dict[RequestId, _Live] = {}  # at prefill groups

    def add_group(self, group: SimGroup) -> None:
        """Before the first request."""
        group_id = group.info.group_id
        self.index.add_group(group_id, group.info.num_blocks)
        self.index.load_snapshot(group_id, 0, ())
        pool = self._prefilling if group.info.role is Role.PREFILL else self._answering
        pool[group_id] = group

    def arrive(self, traced: TraceRequest) -> None:
        """A request comes now."""
        request = GenerateRequest(
            request_id=RequestId(str(traced.number)),
            prompt_token_ids=tuple(prompt_tokens(traced, self._vocab_size)),
            sampling=SamplingParams(max_tokens=traced.output_tokens, temperature=0.0, ignore_eos=True),
        )
        size = next(iter(self._answering.values())).info.block_size
        chains = {size: block_hashes(request.prompt_token_ids, size)}
        started = self._stopwatch()
        decision = self._choose(request, chains)
        self.decision_s.append(self._stopwatch() - started)
        group = self._answering[decision.ranked[0].group_id]
        served = Served(request=traced, arrival_s=traced.arrival_s, group_id=group.info.group_id)
        self.results.append(served)
        live = _Live(served, request.request_id, group, decision, chains)
        self._live[request.request_id] = live
        self._placement.charge(decision, request.request_id, chains, group)
        source = self._begin_reading(live, request)
        group.load.on_accepted(request.request_id)
        group.submit(replace(request, kv_source=source))

    def check_end(self) -> None:
        """Asserts that every request has ended once, and nothing is charged any more."""
        assert not self._live and not self._prompts, f"{len(self._live)} requests have not ended"
        for group in (*self._answering.values(), *self._prefilling.values()):
            assert group.load.num_requests == 0, f"{group.info.group_id} is charged with requests that ended"

    # -- from the groups ----------------------------------------------------------------------------------

    def on_events(self, group: SimGroup, events: list[BlockEvent]) -> None:
        """See OutputListener."""
        is_sound = self.index.apply(group.info.group_id, events)
        assert is_sound, f"the block log of {group.info.group_id} has a gap"

    def on_stats(self, group: SimGroup, stats: GroupStats) -> None:
        """See OutputListener."""
        group.load.on_stats(stats)

    def on_chunk(self, group: SimGroup, chunk: TokenChunk) -> None:
        """See OutputListener."""
        request_id, now_s = chunk.request_id, self._world.now_s
        if (prompt := self._prompts.get(request_id)) is not None:
            self._prompt_ended(request_id, prompt, group, chunk)
            return
        live = self._live[request_id]
        served = live.served
        if chunk.error is None:
            group.load.on_token(request_id, now_s)
            if served.first_s is None:
                served.first_s = now_s
                served.cached_tokens = self._count_read(live, chunk)
        if chunk.finish_reason is not None:
            served.end_s = now_s
            served.refusal = chunk.error_code
            served.num_tokens = served.request.output_tokens if chunk.error is None else 0
            group.load.on_ended(request_id)
            del self._live[request_id]

    # -- one request --------------------------------------------------------------------------------------

    def _choose(self, request: GenerateRequest, chains: BlockChains) -> Decision:
        if self._rival is None:
            return self._placement.choose(request, chains, self._answering, self._prefilling)
        now_s = self._world.now_s
        matches = self.index.match(next(iter(chains.values())))
        loads = [group.load.view(now_s, 0.0) for group in self._answering.values()]
        num = len(request.prompt_token_ids)
        best = Choice(self._rival.choose(num, loads, matches), 0.0, {})
        return Decision(
            request_id=request.request_id,
            ranked=(best,),
            matches=matches,
            num_prompt_tokens=num,
        )

    def _begin_reading(self, live: _Live, request: GenerateRequest) -> KVSource | None:
        """What the group reads from, as the dispatcher's `Fetcher` has it; but where a prompt is refused,
        no other source is tried."""
        best = live.decision.ranked[0]
        if best.source is None:
            return None
        transfer_id = None
        source = self._prefilling.get(best.source) or self._answering[best.source]
        live.source = source
        live.source_cached_tokens = self._placement.cached_tokens(live.decision, source)
        if source.info.role is Role.PREFILL:
            transfer_id = f"{live.served.request.number:032x}"
            prompt_id = RequestId(f"{request.request_id}+1")
            self._prompts[prompt_id] = live
            self._placement.charge_prompt(live.decision, prompt_id, live.chains, source)
            source.load.on_accepted(prompt_id)
            source.submit(
                replace(
                    request,
                    request_id=prompt_id,
                    sampling=SamplingParams(max_tokens=0),
                    transfer_id=transfer_id,
                )
            )
        else:
            live.is_readable = True
        return KVSource(group_id=best.source, host="simulated", port=1, transfer_id=transfer_id)

    def _prompt_ended(self, prompt_id: RequestId, live: _Live, source: SimGroup, chunk: TokenChunk) -> None:
        """A prefill group has computed a prompt, or has refused it."""
        del self._prompts[prompt_id]
        if chunk.error is None:
            source.load.on_token(prompt_id, self._world.now_s)
            live.source_cached_tokens = chunk.num_cached_tokens
            live.is_readable = True
        else:
            live.source = None
            live.group.submit(Redirect(live.request_id, None))
        source.load.on_ended(prompt_id)

    def _count_read(self, live: _Live, chunk: TokenChunk) -> int:
        """Notes that the two groups read; returns the tokens that were cached before this request."""
        own = self._placement.cached_tokens(live.decision, live.group)
        found, source = chunk.num_cached_tokens, live.source
        best = live.decision.ranked[0]
        if source is None or not best.fetched_tokens:
            return found
        pulled = max(found - own, 0)
        self.pulled_tokens += pulled
        pair = (source.info.group_id, live.group.info.group_id)
        if live.is_readable:
            if pulled:
                info = live.group.info
                num_bytes = pulled // info.block_size * info.kv_bytes_per_block
                self._placement.pairs.on_read(pair, num_bytes)
            else:
                self._placement.pairs.on_failed(pair)
        return max(own, min(live.source_cached_tokens, found)) if pulled else found
