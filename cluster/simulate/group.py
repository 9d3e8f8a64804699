"""A worker group in virtual time: the real engine and what `workers.engine.loop` and the group's server do
around it.

    submit --> inbox --> [ take all; sweep; step ]* --> output at the step's end: events, load, tokens

Commands that come during a step wait for its end. The load is reported as the server does it: with an output,
but at most every `stats_period_s`, and then the newest; and once a second during a step that is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cluster.figures.step_cost import StepCost
from cluster.simulate.executor import CostExecutor
from cluster.simulate.leap import Leap
from cluster.simulate.world import World
from router.routing.load import LoadTracker
from workers.config import CacheConfig, ScheduleConfig, TransferConfig
from workers.engine.engine import Engine
from workers.engine.exchange import ExchangeCommand, ExchangeSetup
from workers.engine.fetch import KVPeers
from workers.engine.leases import LeaseId
from workers.engine.request import EngineLimits
from workers.types import (
    BlockEvent,
    BlockOffer,
    GenerateRequest,
    GroupInfo,
    GroupStats,
    RequestRefused,
    TokenChunk,
    error_chunk,
)

STATS_PERIOD_S = 0.05  # as workers.data_plane.server.ServerLimits
HEARTBEAT_S = 1.0
_TRANSFER = TransferConfig(stall_s=3600.0)  # a real source says that it lives; those here always do
_SWEEP_S = 1.0  # between two looks at timers when nothing else happens, as workers.engine.loop

Command = GenerateRequest | ExchangeCommand
OfferListener = Callable[[LeaseId, tuple[BlockOffer, ...], bool], None]


class OutputListener(Protocol):
    """Who hears what a group says."""

    def on_events(self, group: SimGroup, events: list[BlockEvent]) -> None:
        """Changes of its cache."""
        ...

    def on_stats(self, group: SimGroup, stats: GroupStats) -> None:
        """Its load."""
        ...

    def on_chunk(self, group: SimGroup, chunk: TokenChunk) -> None:
        """First tokens and ends. Of a sequence that only goes on not every token is passed on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """What all groups have in common."""

    cost: StepCost
    crowded_cost: StepCost | None  # of a step that begins while another group computes; None: as alone
    cache: CacheConfig
    schedule: ScheduleConfig
    can_leap: bool = True  # False: every step by itself, which takes longer and comes to the same


class SimGroup:
    """One group. It has what placement asks of a link: `info`, `load`, `silent_s`."""

    def __init__(
        self,
        *,
        world: World,
        info: GroupInfo,
        kind: GroupKind,
        neighbours: Collection[SimGroup],
        listener: OutputListener,
        peers: KVPeers | None,
        on_offer: OfferListener | None,
    ) -> None:
        """neighbours: all groups, this one among them, and some that come later."""
        self.info = info
        self.load = LoadTracker(
            info.group_id,
            info.block_size,
            info.num_blocks,
            role=info.role,
            kv_format=f"{info.kv_dtype} {info.block_size}" if info.exchanges_kv else "",
            block_bytes=info.kv_bytes_per_block,
            context_token_s=info.context_token_s,
        )
        self.silent_s = 0.0
        self.busy_s = 0.0  # in steps
        self.leases: set[LeaseId] = set()  # that other groups have here, and renew
        self._world = world
        self._kind = kind
        self._neighbours = neighbours
        self._listener = listener
        self._on_offer = on_offer
        self._executor = CostExecutor(world=world, cost=self._cost, num_blocks=info.num_blocks)
        self._offers: list[tuple[LeaseId, tuple[BlockOffer, ...], bool]] = []  # of the step that runs
        self.engine = Engine(
            limits=EngineLimits(
                vocab_size=info.vocab_size, max_model_len=info.max_model_len, eos_token_ids=()
            ),
            cache=kind.cache,
            schedule=kind.schedule,
            executor=self._executor,
            clock=self._executor.clock,
            exchange=ExchangeSetup(peers=peers, on_offer=self._offered, transfer=_TRANSFER),
        )
        self._inbox: list[Command] = []
        self._is_stepping = False
        self._is_woken = False
        self._is_sweeping = False
        self._leap: Leap | None = None
        self._number = 0  # of the step or leap that runs: the end of an earlier one is not listened to
        self._stats: GroupStats | None = None  # of the last output; None: as the engine says now
        self._stats_sent_s = float("-inf")
        self._is_stats_due = False  # a timer for it is set

    # -- from outside -------------------------------------------------------------------------------------

    def submit(self, command: Command) -> None:
        """Hands over a request or a command; it is taken before the next step."""
        self._inbox.append(command)
        if self._leap is not None:
            self._shorten()
        elif not self._is_stepping and not self._is_woken:
            self._is_woken = True
            self._world.after(0.0, self._wake)

    def check_end(self) -> None:
        """Asserts that nothing is left and all invariants hold."""
        assert not self._inbox and not self._is_stepping, f"{self.info.group_id} has not come to its end"
        assert not self.engine.has_work(), f"{self.info.group_id} has requests left"
        assert not self.leases, f"{self.info.group_id} is still read"
        self.engine.check_integrity()

    # -- the loop -----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Between two steps."""
        self._is_woken = False
        if self._is_stepping:
            return
        engine = self.engine
        has_news = False
        if self._inbox:
            self._last_stats()
            commands, self._inbox = self._inbox, []
            for command in commands:
                if isinstance(command, GenerateRequest):
                    has_news |= self._add(command)
                else:
                    engine.handle(command)
                    has_news = True
        if engine.has_timers():
            has_news |= self._sweep()
        if has_news:
            self._emit([])
        if engine.can_step():
            self._step()
        if not self._is_stepping and engine.has_timers() and not self._is_sweeping:
            self._is_sweeping = True
            self._world.after(_SWEEP_S, self._look_again)

    def _add(self, request: GenerateRequest) -> bool:
        """Whether it was refused, which has been said."""
        try:
            self.engine.add(request)
        except RequestRefused as refused:
            self._listener.on_chunk(self, error_chunk(request.request_id, 0, refused.code, refused.message))
            return True
        return False

    def _sweep(self) -> bool:
        for lease_id in self.leases:  # readers that live renew every two seconds
            self.engine.renew_lease(lease_id)
        return self.engine.sweep()

    def _look_again(self) -> None:
        self._is_sweeping = False
        self._wake()

    def _step(self) -> None:
        if self._kind.can_leap:
            leap = Leap(self.engine, self._kind.cost)
            if leap.has_more:
                self._begin_leap(leap)
                return
        self._last_stats()
        chunks = self.engine.step()
        if not self._executor.has_run:  # all wait for other groups
            self._emit([])
            return
        self._start(self._executor.settle(), chunks)

    def _cost(self) -> StepCost:
        crowded = self._kind.crowded_cost
        if crowded is None or not any(group._is_stepping for group in self._neighbours if group is not self):
            return self._kind.cost
        return crowded

    def _start(self, end_s: float, chunks: list[TokenChunk]) -> None:
        """A step, or a leap, runs until then."""
        self._is_stepping = True
        self._number += 1
        self.busy_s += end_s - self._world.now_s
        self._world.at(end_s, partial(self._finish, self._number, chunks))
        beat_s = self._world.now_s + HEARTBEAT_S
        while self._leap is None and beat_s < end_s:
            self._world.at(beat_s, self._beat)
            beat_s += HEARTBEAT_S

    def _finish(self, number: int, chunks: list[TokenChunk]) -> None:
        if number != self._number:
            return
        self._is_stepping = False
        leap, self._leap = self._leap, None
        if leap is not None:
            leap.take()
        self._emit(chunks)
        if leap is not None and leap.has_more and not self._inbox and not self.engine.has_timers():
            self._begin_leap(leap)
            return
        offers, self._offers = self._offers, []
        for offer in offers:
            if self._on_offer is not None:
                self._on_offer(*offer)
        self._wake()

    # -- leaps --------------------------------------------------------------------------------------------

    def _begin_leap(self, leap: Leap) -> None:
        """Up to the next report of the load: that is to be of the last step which ends before it. A step in
        the middle of which it falls is a leap by itself."""
        now_s = self._world.now_s
        due_s = self._stats_sent_s + STATS_PERIOD_S
        leap.begin(now_s, max(due_s, now_s))
        if len(leap.ends_s) > 1 and leap.ends_s[-1] >= due_s:
            leap.ends_s.pop()
        self._leap = leap
        self._start(leap.ends_s[-1], [])

    def _shorten(self) -> None:
        """Something has come: the leap ends with the step that runs now."""
        assert self._leap is not None
        ends_s, now_s = self._leap.ends_s, self._world.now_s
        while len(ends_s) > 1 and ends_s[-2] >= now_s:
            self.busy_s -= ends_s[-1] - ends_s[-2]
            ends_s.pop()
        self._number += 1
        self._world.at(ends_s[-1], partial(self._finish, self._number, []))

    # -- what the group says ------------------------------------------------------------------------------

    def _emit(self, chunks: list[TokenChunk]) -> None:
        events = self.engine.take_events()
        if events:
            self._listener.on_events(self, events)
        self._stats = None
        self._report()
        for chunk in chunks:
            self._listener.on_chunk(self, chunk)

    def _last_stats(self) -> GroupStats:
        """Of the last output. To be called before the engine does anything: it is ahead of time then."""
        if self._stats is None:
            self._stats = self.engine.stats()
        return self._stats

    def _report(self) -> None:
        """The load, or a timer for it when the last one is too young."""
        now_s = self._world.now_s
        due_s = self._stats_sent_s + STATS_PERIOD_S
        if due_s <= now_s:
            self._stats_sent_s = now_s
            self._listener.on_stats(self, self._last_stats())
        elif not self._is_stats_due:
            self._is_stats_due = True
            self._world.at(due_s, self._report_late)

    def _report_late(self) -> None:
        self._is_stats_due = False
        self._stats_sent_s = self._world.now_s
        self._listener.on_stats(self, self._last_stats())

    def _beat(self) -> None:
        self._listener.on_stats(self, self._last_stats())

    def _offered(self, lease_id: LeaseId, offers: tuple[BlockOffer, ...], is_complete: bool) -> None:
        """Blocks that a step has sealed can be read at its end."""
        if self._executor.has_run:
            self._offers.append((lease_id, offers, is_complete))
        elif self._on_offer is not None:
            self._on_offer(lease_id, offers, is_complete)
