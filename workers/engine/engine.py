"""The engine of a group: takes requests, computes them step by step, says what came.

    engine.add(request)
    while engine.has_work():
        for chunk in engine.step(): ...

Token ids in, token ids out: no text, no stop strings, no deadlines of requests. One thread uses it
(`workers.engine.loop.EngineLoop` when requests come from others).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from workers.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from workers.engine.answers import choices_of, open_choices, take_search, token_chunk
from workers.engine.block_pool import BlockPool
from workers.engine.drafting import drafting_of
from workers.engine.exchange import ExchangeCommand, ExchangeSetup, KVExchange, Redirect
from workers.engine.execution import Failure, Outcome, Outcomes, failure_of, num_right_drafts
from workers.engine.grammars import GrammarBackend, Grammars
from workers.engine.leases import LeaseId
from workers.engine.meter import MeteredModel, StepMeter
from workers.engine.plan import ScheduledStep
from workers.engine.prefixes import PrefixesInProgress
from workers.engine.request import (
    EngineLimits,
    RequestState,
    check_fits,
    duplicate_id,
    is_transfer_id,
    queue_full,
    validate,
)
from workers.engine.scheduler import Scheduler
from workers.engine.search import make_search
from workers.engine.sequence import SampledAt, Sequence, SequenceState
from workers.engine.step import Executor, Sampled, SliceResult, StepPlan, StepStarter
from workers.engine.steps import Steps
from workers.engine.totals import EngineTotals, group_report, group_stats
from workers.report import GroupReport
from workers.types import (
    BlockEvent,
    FinishReason,
    GenerateRequest,
    GroupStats,
    RequestId,
    RequestRefused,
    TokenChunk,
    error_chunk,
)

_PREFILLING, _FINISHED = SequenceState.PREFILLING, SequenceState.FINISHED

_log = logging.getLogger(__name__)


class Engine:
    """Scheduler, block pool and executor of one group."""

    def __init__(
        self,
        *,
        limits: EngineLimits,
        cache: CacheConfig,
        schedule: ScheduleConfig,
        executor: Executor,
        starter: StepStarter | None = None,
        speculative: SpeculativeConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        exchange: ExchangeSetup | None = None,
        metered: MeteredModel | None = None,
        grammars: GrammarBackend | None = None,
    ) -> None:
        """starter: to plan steps ahead (`workers.engine.ahead`); None: never.
        speculative: how tokens are guessed; None: not.
        exchange: of blocks with other groups; None: there is none.
        metered: to say how well steps use the machine; None: it is not said.
        grammars: compiles those of requests; None: a request that has one is refused."""
        exchange = exchange or ExchangeSetup()
        self._limits = limits
        self._clock = clock
        self._block_size = cache.block_size
        self._prefix_reuse = cache.prefix_reuse and limits.is_prefix_reusable
        self._max_waiting = schedule.max_waiting
        self._max_rows = min(schedule.max_running, schedule.max_step_tokens)
        self._pool = BlockPool(executor.num_blocks, exchange.first_generation)
        self._meter = StepMeter(metered, clock)
        in_progress = PrefixesInProgress()
        self._exchange = KVExchange(
            pool=self._pool,
            block_size=self._block_size,
            in_progress=in_progress,
            clock=clock,
            setup=exchange if self._prefix_reuse else replace(exchange, peers=None),
        )
        self._drafting = drafting_of(speculative, self._pool, cache.block_size, executor, limits, schedule)
        self._scheduler = Scheduler(
            schedule=schedule,
            pool=self._pool,
            block_size=self._block_size,
            prefix_reuse=self._prefix_reuse,
            in_progress=in_progress,
            exchange=self._exchange,
            drafting=self._drafting,
            limits=limits,
        )
        self._grammars = Grammars(grammars, clock)
        starter = starter if self._drafting is None and limits.recompute_past is None else None
        self._steps = Steps(self._scheduler, self._pool, executor, starter, self._begin)
        self._requests: dict[RequestId, list[Sequence]] = {}  # unfinished ones, all choices
        self._is_stalled = False  # the last step found nothing to do, and nothing has happened since
        self._num_arrived = 0
        self._totals = EngineTotals()

    def add(self, request: GenerateRequest, *, is_counted: bool = True) -> None:
        """Queues a request; is_counted: in totals and estimates. Raises RequestRefused: nothing changed."""
        try:
            self._check(request)
        except RequestRefused:
            if is_transfer_id(request.transfer_id):
                self._exchange.leases.request_refused(request.transfer_id)
                self._exchange.leases.look()
            raise
        self._num_arrived += 1
        block_size = self._block_size if self._prefix_reuse else None
        parent = RequestState(request, limits=self._limits, arrival=self._num_arrived, block_size=block_size)
        parent.arrived_s, parent.is_counted = self._clock(), is_counted
        if request.beam is not None:
            sequences = [Sequence(parent, 0)]
            make_search(sequences[0], request.beam)
        else:
            sequences = [Sequence(parent, choice, begun) for choice, begun in request.choices().items()]
        if block_size is not None:
            for sequence in sequences:
                sequence.hash_begun(block_size)
        if request.grammar is not None and request.sampling.max_tokens > 0:
            self._grammars.want(sequences, request.grammar)
        self._requests[request.request_id] = sequences
        self._scheduler.add(sequences)
        self._is_stalled = False
        if request.transfer_id is not None:  # others wait for it: it does not wait for others
            self._exchange.leases.request_came(request.transfer_id)
        elif request.kv_source is not None:
            self._exchange.fetches.want(sequences[0], request.kv_source)

    def abort(self, request_id: RequestId) -> bool:
        """Drops a request and frees its blocks, at once or after the step in flight. False when it is unknown
        or has ended."""
        sequences = self._requests.get(request_id)
        if sequences is None:
            return False
        for sequence in sequences:
            if sequence.state is not _FINISHED:
                self._end(sequence, FinishReason.CANCELLED)
        self._exchange.leases.look()  # readers of its blocks need not wait any more
        self._is_stalled = False
        return True

    def handle(self, command: ExchangeCommand) -> None:
        """Takes what there is to say about blocks of other groups, or for them."""
        self._is_stalled = False
        if not isinstance(command, Redirect):
            self._exchange.handle(command)
        elif (sequences := self._requests.get(command.request_id)) is not None:
            self._exchange.redirect(sequences[0], command.source)

    def on_grammar(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, in any thread, when can_step() may have become true by itself."""
        self._grammars.on_news = wake

    def renew_lease(self, lease_id: LeaseId) -> None:
        """The reader of a lease lives. May be called in any thread."""
        self._exchange.leases.renew(lease_id)

    def sweep(self) -> bool:
        """Ends exchanges that have been silent for too long; returns whether there were any. To be called
        between steps, and at least every second while has_timers()."""
        self._is_stalled = False
        return self._exchange.sweep()

    def step(self) -> list[TokenChunk]:
        """Computes one step and returns what its sequences have to say; [] when idle, or when all wait for
        other groups or grammars (then can_step() says so).

        Raises GroupFailed when the group cannot compute any more: then only fail_all() is left to do.
        """
        started = self._pool.now_s = self._clock()
        chunks: list[TokenChunk] = []
        for sequence, refused in self._grammars.collect():
            self._fail(sequence.parent.request.request_id, refused.code, refused.sentence, chunks)
        computed = self._steps.next(started)
        if computed is None:
            self._is_stalled = True
            return chunks
        scheduled, outcomes, _ = computed
        for index, sequence in enumerate(scheduled.sequences):
            if sequence.state is not _FINISHED:  # ended in this loop, with a choice beside it, or in flight
                self._take(sequence, scheduled.plan, index, outcomes[index], chunks)
        if scheduled.searches:
            self._take_searches(scheduled, outcomes, chunks)
        if self._exchange.leases.num_growing:  # before anything sealed here can be evicted
            self._exchange.leases.look()
        ended = self._clock()
        seconds = self._steps.end(computed, ended)
        self._meter.observe(scheduled.plan, scheduled.num_decode_rows, ended_s=ended, seconds=seconds)
        self._totals.add_step(seconds)
        if self._drafting is not None and scheduled.num_decode_rows == len(scheduled.plan.slices):
            rows = sum(len(piece.token_ids) for piece in scheduled.plan.slices)
            self._drafting.note_step(rows, seconds)
        return chunks

    def has_work(self) -> bool:
        return bool(self._requests) or self._steps.are_in_flight

    def can_step(self) -> bool:
        """Whether a step may find something to do: there are requests, and not all were found to wait for
        other groups or their grammars since the last command, sweep or news of a grammar."""
        return (not self._is_stalled or self._grammars.has_news) and self.has_work()

    def has_timers(self) -> bool:
        """Whether sweep() is wanted even when nothing else happens."""
        return self._exchange.has_timers or self._grammars.num_waiting > 0

    @property
    def generations(self) -> memoryview:
        """Of all blocks, (num_blocks,) int64, live and read-only: equal before and after a read by another
        group, the read is good."""
        return memoryview(self._pool.generations).toreadonly()

    def unfinished_choices(self, request_id: RequestId) -> tuple[int, ...]:
        """Choices that have not had their last chunk; () for an unknown request."""
        return open_choices(self._requests.get(request_id, ()))

    def unfinished(self) -> list[tuple[RequestId, int]]:
        """All choices that have not had their last chunk."""
        return [(each, choice) for each, own in self._requests.items() for choice in open_choices(own)]

    def fail_all(self) -> None:
        """Ends every request as failed and frees all blocks but those that pulls still write; says nothing of
        it: see unfinished()."""
        self._steps.drop()
        self._exchange.leases.close_all()
        for sequences in list(self._requests.values()):
            for sequence in sequences:
                if sequence.state is not _FINISHED:
                    self._end(sequence, FinishReason.ERROR)
        self._grammars.close()

    @property
    def num_active_blocks(self) -> int:
        return self._pool.num_active

    def stats(self) -> GroupStats:
        """Load and totals now. Requests are counted as ended once, by the reason of their last choice;
        running and waiting count sequences (choices), the waiting ones with those that were preempted."""
        return group_stats(self._scheduler, self._pool, self._exchange, self._totals, self._drafting)

    def take_report(self) -> GroupReport | None:
        """What has been counted, about once a second and whenever there is nothing more to do; None when it
        is not the time."""
        return group_report(self._meter, self._pool, self._exchange) if self.has_report() else None

    def has_report(self) -> bool:
        """Whether take_report() has one."""
        return self._meter.is_due(is_idle=not self._requests)

    def take_events(self) -> list[BlockEvent]:
        """Changes of the prefix cache since the last call. To be called after every step: they add up."""
        return self._pool.take_events()

    def check_integrity(self) -> None:
        """Asserts all invariants of engine, scheduler and pool; O(blocks + requests). Valid between steps."""
        scheduled, unfinished = self._scheduler.check_integrity(), 0
        for request_id, sequences in self._requests.items():
            left = sum(sequence.state is not _FINISHED for sequence in sequences)
            assert left == sequences[0].parent.num_unfinished, f"{request_id}: {left} choices left"
            assert left > 0, f"{request_id} has ended and is still known"
            unfinished += left
        assert scheduled == unfinished, f"{scheduled} sequences scheduled, {unfinished} unfinished"
        if not self.has_work() and not self._exchange.tables():
            assert self._pool.num_active == 0, f"idle with {self._pool.num_active} blocks held"

    def _begin(self, scheduled: ScheduledStep) -> None:
        """A step has been planned."""
        scheduled.note_admitted(self._pool.now_s)
        self._grammars.start(scheduled.sequences, scheduled.plan.slices)

    def _check(self, request: GenerateRequest) -> None:
        """Raises RequestRefused when the request cannot be taken, now or ever."""
        if request.request_id in self._requests:
            raise duplicate_id(request)
        validate(request, self._limits)
        if request.grammar is not None:
            self._grammars.check(request.grammar)
        check_fits(request, self._pool.num_blocks, self._block_size, self._max_rows)
        if self._scheduler.num_queued_requests >= self._max_waiting:
            raise queue_full(self._max_waiting)

    def _take_searches(self, scheduled: ScheduledStep, outcomes: Outcomes, chunks: list[TokenChunk]) -> None:
        """Brings the beam searches forward: their slices are the last ones, those of one side by side."""
        first = len(scheduled.sequences)
        found = zip(scheduled.searches, scheduled.plan.slices[first:], outcomes[first:], strict=True)
        for sequence, rows in groupby(found, key=itemgetter(0)):
            pairs = [(piece, outcome) for _, piece, outcome in rows]
            answer = take_search(sequence, pairs, self._scheduler, self._limits.vocab_size, self._clock())
            if isinstance(answer, Failure):
                self._fail_by(sequence, answer, chunks)
            elif answer:
                chunks += answer
                if (reason := answer[0].finish_reason) is not None:
                    self._totals.num_generated += sum(len(chunk.token_ids) for chunk in answer)
                    self._end(sequence, reason)

    def _fail_by(self, sequence: Sequence, failure: Failure, chunks: list[TokenChunk]) -> None:
        """Ends the request of a sequence that came to nothing."""
        request_id = sequence.parent.request.request_id
        _log.error(
            "request %s choice %d: %s", request_id, sequence.choice, failure.detail, exc_info=failure.cause
        )
        spoiled = None if failure.is_sound else sequence
        self._fail(request_id, failure.code, failure.message, chunks, spoiled=spoiled)

    def _take(
        self, sequence: Sequence, plan: StepPlan, index: int, outcome: Outcome, chunks: list[TokenChunk]
    ) -> None:
        """Brings a sequence forward by what the step found for its slice, of this index."""
        piece = plan.slices[index]
        failure = failure_of(piece, outcome, self._limits.vocab_size)
        if failure is not None:
            self._fail_by(sequence, failure, chunks)
            return
        assert isinstance(outcome, SliceResult)
        self._scheduler.advance(sequence, len(piece.token_ids) - piece.num_drafts)
        if piece.prompt_targets is not None:
            assert sequence.prompt_scores is not None
            sequence.prompt_scores.extend(outcome.prompt_logprobs)
        if sequence.num_computed == sequence.num_tokens:
            chunks.append(self._answer(sequence, plan, index, outcome))

    def _answer(self, sequence: Sequence, plan: StepPlan, index: int, result: SliceResult) -> TokenChunk:
        """The chunk of a sequence whose tokens are all computed; appends what was sampled, as far as the
        drafts were right, and ends it if its last token was among it."""
        piece = plan.slices[index]
        sampled: list[Sampled] = []
        reason: FinishReason | None = FinishReason.LENGTH  # of a request for no tokens at all
        stop_token_id: int | None = None
        num_right = num_right_drafts(piece, result)
        for place, found in enumerate(result.sampled):
            sampled.append(found)
            sequence.append(found.token_id)
            reason, stop_token_id = sequence.end_reason()
            if reason is not None or place == num_right:
                break
            self._scheduler.advance(sequence, 1)  # the draft's keys and values are the token's
        self._totals.num_generated += len(sampled) * sequence.parent.is_counted
        if self._drafting is not None and sampled:
            said, last = [found.token_id for found in result.sampled], len(sampled) - 1
            self._drafting.end(sequence, SampledAt(plan.number, index, result.row_of(last)), said, last)
            self._totals.num_drafted += piece.num_drafts
            self._totals.num_accepted += last
        if reason is not None:
            if sequence.parent.is_counted:
                self._scheduler.estimate.observe(len(sequence.output), was_cut=reason is FinishReason.LENGTH)
            self._end(sequence, reason)
        elif sequence.state is _PREFILLING:
            self._scheduler.start_decoding(sequence)
        return token_chunk(sequence, sampled, reason, stop_token_id, self._clock)

    def _fail(
        self,
        request_id: RequestId,
        code: str,
        message: str,
        chunks: list[TokenChunk],
        *,
        spoiled: Sequence | None = None,
    ) -> None:
        """Ends all choices of a request with an error; what `spoiled` has computed is not to be trusted."""
        for sequence in self._requests[request_id]:
            if sequence.state is _FINISHED:
                continue
            self._end(sequence, FinishReason.ERROR, is_spoiled=sequence is spoiled)
            chunks += [error_chunk(request_id, choice, code, message) for choice in choices_of(sequence)]

    def _end(self, sequence: Sequence, reason: FinishReason, *, is_spoiled: bool = False) -> None:
        (self._scheduler.remove_spoiled if is_spoiled else self._scheduler.remove)(sequence)
        if sequence.parent.num_unfinished == 0:
            request = sequence.parent.request
            del self._requests[request.request_id]
            if sequence.parent.awaits_grammar:
                self._grammars.drop(sequence.parent)
            self._totals.num_ended[reason] += sequence.parent.is_counted
            if request.transfer_id is not None:
                self._exchange.leases.request_ended(request.transfer_id)
