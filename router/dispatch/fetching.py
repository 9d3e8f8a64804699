"""A request whose group reads blocks of the prompt from another group: the dispatcher's second hand.

Life of such a request, here with a prefill group P and the group D that answers:

    begin      D gets the request with the source; P gets the prompt with the same transfer id, at once
    computed   P has ended its request; D has read, or reads, the last blocks
    redirect   P refuses or fails: D is told the next source in the order of the ranking, or none. None, too,
               when P has crashed: the prompt may have done it, and would do it to the next one
    first      D's answer begins: what was read and what was computed instead is counted, and P is not needed
               any more; its last word usually comes in the same moment, and if not, it is aborted
    over       nobody reads the answer any more: P's request is aborted

A neighbour that has the blocks cached gets no request, and is not watched: D sees for itself when it is gone.
Whatever fails here costs time, never an answer: D computes what it does not get.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from router.dispatch.attempts import CRASHED, Attempt, Attempts, has_begun, is_computed
from router.dispatch.interface import Decision, Fetch, FetchCounts, PrefillOutcome, SourceKind
from router.dispatch.link import GroupLink
from router.dispatch.placement import BlockChains, Placement, known_tokens
from router.routing.pairing import Pair
from router.tasks import end_tasks
from workers.tasks import start_task
from workers.types import GenerateRequest, GroupId, KVSource, RequestId, Role, SamplingParams, TokenChunk

_log = logging.getLogger(__name__)

_GRACE_S = 0.1  # for P's end to arrive, once D's answer has begun


class Fetcher:
    """Begins fetches, and ends the tasks that watch prefill groups. Lives on the router's event loop."""

    def __init__(
        self,
        *,
        placement: Placement,
        attempts: Attempts,
        ready: Callable[[], Mapping[GroupId, GroupLink]],
        new_transfer_id: Callable[[], str],
        max_attempts: int,
    ) -> None:
        """`ready` are the groups that take requests now. `new_transfer_id` gives 128 random bits as 32 hex
        digits. At most `max_attempts` prefill groups are asked for one request."""
        self.placement = placement
        self.attempts = attempts
        self.ready = ready
        self.new_transfer_id = new_transfer_id
        self.max_attempts = max_attempts
        self.counts = FetchCounts()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, attempt: Attempt, request: GenerateRequest, decision: Decision, chains: BlockChains
    ) -> KVSource | None:
        """What the group of the best choice is told to read from; a prefill group begins to compute it."""
        best = decision.ranked[0]
        link = self.ready().get(best.source) if best.source is not None else None
        self.counts.sources[_kind(link)] += 1
        if link is None:
            return None
        decision.fetch = Fetch(source=best.source, wanted_tokens=best.fetched_tokens)
        running = _RunningFetch(self, attempt, request, decision, decision.fetch, chains)
        attempt.listener = running
        return running.begin(link)

    def start(self, task: asyncio.Task[None]) -> None:
        """Keeps a task until it has ended."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Ends all watching. May be called twice."""
        await end_tasks(*self._tasks)


class _RunningFetch:
    """The fetch of one attempt; implements `attempts.AnswerListener`."""

    def __init__(
        self,
        fetcher: Fetcher,
        attempt: Attempt,
        request: GenerateRequest,
        decision: Decision,
        fetch: Fetch,
        chains: BlockChains,
    ) -> None:
        self._fetcher = fetcher
        self._attempt = attempt
        self._request = request
        self._decision = decision
        self._fetch = fetch
        self._chains = chains
        self._source: GroupLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._cached_tokens = 0  # of the prompt, that the source had before this request
        self._is_computed = False  # the source has all that it was asked for
        self._has_begun = False  # the answer

    def begin(self, link: GroupLink) -> KVSource:
        """The first source."""
        transfer_id = self._turn_to(link)
        if transfer_id is not None:
            what = f"watching of the prompt of {self._attempt.wire_id}"
            self._task = start_task(self._watch(link, transfer_id), what)
            self._fetcher.start(self._task)
        return _kv_source(link, transfer_id)

    # ---- from the attempt

    def on_first(self, link: GroupLink, chunk: TokenChunk) -> TokenChunk:
        """Counts what was read. The reader sees as cached what had been before this request."""
        if not has_begun(chunk):  # an error: the answer is over
            return chunk
        self._has_begun = True
        if self._task is not None and not self._task.done():
            asyncio.get_running_loop().call_later(_GRACE_S, self._task.cancel)
        own = self._fetcher.placement.cached_tokens(self._decision, link)
        found = chunk.num_cached_tokens
        pulled = max(found - own, 0)
        self._count(link, pulled)
        if not pulled:
            return chunk
        before = max(own, min(self._cached_tokens, found))
        return chunk if before >= found else replace(chunk, num_cached_tokens=before)

    def on_over(self) -> None:
        """The answer is over, however it ended."""
        if self._task is not None and not self._has_begun:
            self._task.cancel()

    # ---- prefill groups

    async def _watch(self, link: GroupLink | None, transfer_id: str | None) -> None:
        """Until the prompt is computed, or D has been told to do without."""
        number = 0
        while link is not None and transfer_id is not None:
            number += 1
            outcome = await self._compute(link, transfer_id, number)
            self._ended(link.info.group_id, outcome)
            if outcome is PrefillOutcome.COMPUTED or self._has_begun:
                return
            link = None if outcome is PrefillOutcome.CRASHED else self._next_source(number)
            if link is None:
                self._source = self._fetch.source = transfer_id = None
            else:
                transfer_id = self._turn_to(link)
            self._fetcher.counts.redirects[_kind(link)] += 1
            await asyncio.wait({self._attempt.taken})  # ends with the attempt at the latest, which ends us
            owner = self._attempt.owner
            assert owner is not None
            owner.redirect(self._attempt.wire_id, _kv_source(link, transfer_id) if link is not None else None)

    async def _compute(self, link: GroupLink, transfer_id: str, number: int) -> PrefillOutcome:
        """Has the prompt computed by a prefill group. How it ended."""
        group_id = link.info.group_id
        prompt = GenerateRequest(
            request_id=RequestId(f"{self._attempt.wire_id}+{number}"),
            prompt_token_ids=known_tokens(self._request),
            sampling=SamplingParams(max_tokens=0),
            cache_salt=self._request.cache_salt,
            priority=self._request.priority,
            transfer_id=transfer_id,
        )
        placement = self._fetcher.placement
        placement.charge_prompt(self._decision, prompt.request_id, self._chains, link)
        try:
            chunk = await self._fetcher.attempts.ask(link, prompt, _PromptEnd(self._prompt_ended))
        except asyncio.CancelledError:
            self._ended(group_id, PrefillOutcome.OVERTAKEN if self._has_begun else PrefillOutcome.CANCELLED)
            raise
        except Exception as error:  # whatever the transport raises: this group does not have it
            _log.warning("prompt %s: %s did not take it: %r", prompt.request_id, group_id, error)
            return PrefillOutcome.REFUSED
        if not is_computed(chunk):
            _log.warning("prompt %s: %s failed: %s", prompt.request_id, group_id, chunk.error)
            return PrefillOutcome.CRASHED if chunk.error_code in CRASHED else PrefillOutcome.FAILED
        return PrefillOutcome.COMPUTED

    def _prompt_ended(self, chunk: TokenChunk) -> None:
        """At once with the chunk: the answer may begin before the task that waits for it runs."""
        if is_computed(chunk):
            self._cached_tokens = chunk.num_cached_tokens
            self._fetch.prefill_times = chunk.times
            self._is_computed = True

    def _next_source(self, num_asked: int) -> GroupLink | None:
        """The next best source of the group that answers; None: it is better alone."""
        ready = self._fetcher.ready()
        asked = {group_id for group_id, _ in self._fetch.prefills}
        for choice in self._decision.ranked:
            if choice.group_id != self._decision.ranked[0].group_id or choice.source in asked:
                continue
            link = ready.get(choice.source) if choice.source is not None else None
            if choice.source is None or (link is not None and num_asked < self._fetcher.max_attempts):
                return link
        return None

    def _turn_to(self, link: GroupLink) -> str | None:
        """The request's source from now on. The transfer id of the prompt that it must be sent, if any."""
        self._source = link
        self._fetch.source = link.info.group_id
        self._cached_tokens = self._fetcher.placement.cached_tokens(self._decision, link)
        if link.info.role is not Role.PREFILL:
            self._is_computed = True
            return None
        return self._fetcher.new_transfer_id()

    def _ended(self, group_id: GroupId, outcome: PrefillOutcome) -> None:
        self._fetch.prefills.append((group_id, outcome))
        self._fetcher.counts.prefills[outcome] += 1

    # ---- what came of it

    def _count(self, reader: GroupLink, pulled: int) -> None:
        fetch, counts, pairs = self._fetch, self._fetcher.counts, self._fetcher.placement.pairs
        fetch.pulled_tokens = pulled
        counts.pulled_tokens += pulled
        counts.recomputed_tokens += max(fetch.wanted_tokens - pulled, 0)
        if self._source is None or not self._is_computed or not self._source.is_open:
            return  # nothing is known of a pair whose source has gone
        pair: Pair = (self._source.info.group_id, reader.info.group_id)
        if pulled:
            num_bytes = pulled // reader.info.block_size * reader.info.kv_bytes_per_block
            pairs.on_read(pair, num_bytes)
        elif fetch.wanted_tokens:
            pairs.on_failed(pair)


class _PromptEnd:
    """Passes on the first chunk of a prefill group; implements `attempts.AnswerListener`."""

    def __init__(self, on_chunk: Callable[[TokenChunk], None]) -> None:
        self._on_chunk = on_chunk

    def on_first(self, _: GroupLink, chunk: TokenChunk) -> TokenChunk:
        """The chunk as it is."""
        self._on_chunk(chunk)
        return chunk

    def on_over(self) -> None:
        """Nothing to end."""


def _kind(source: GroupLink | None) -> SourceKind:
    if source is None:
        return SourceKind.NONE
    return SourceKind.PREFILL if source.info.role is Role.PREFILL else SourceKind.NEIGHBOUR


def _kv_source(link: GroupLink, transfer_id: str | None) -> KVSource:
    address = link.address
    return KVSource(
        group_id=link.info.group_id, host=address.host, port=address.port, transfer_id=transfer_id
    )
