"""Ranks the groups for a request with all that this router knows, and remembers why.

The bridge between what is live (links, prefix index) and the pure policy and pairing of `router.routing`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from router.dispatch.interface import Decision, DecisionReason
from router.dispatch.pairs import PairTable
from router.routing.load import LoadTracker
from router.routing.pairing import Sources, rank_with_sources
from router.routing.policy import PolicyConfig, RequestView, rank, split_prompt, whole_block_tokens
from router.routing.prefix_index import PrefixIndex
from workers.hashing import BlockHash, block_hashes
from workers.types import GenerateRequest, GroupId, GroupInfo, RequestId

_HASH_IN_THREAD_TOKENS = 16_384  # longer prompts are hashed off the event loop

BlockChains = Mapping[int, Sequence[BlockHash]]  # block size -> hashes of the prompt's full blocks


class PlacedGroup(Protocol):
    """What placement needs of a connected group; a `router.dispatch.link.GroupLink` has it."""

    @property
    def info(self) -> GroupInfo:
        """What it said it is."""
        ...

    @property
    def load(self) -> LoadTracker:
        """Its load."""
        ...

    @property
    def silent_s(self) -> float:
        """Seconds since anything came."""
        ...


class Placement:
    """Ranking, charging and remembering. Lives on the router's event loop."""

    def __init__(
        self, *, index: PrefixIndex, policy: PolicyConfig, clock: Callable[[], float], max_decisions: int
    ) -> None:
        self._index = index
        self._policy = policy
        self._clock = clock
        self._max_decisions = max_decisions
        self._decisions: OrderedDict[RequestId, Decision] = OrderedDict()
        self._turn = 0
        self.reasons: Counter[DecisionReason] = Counter()  # of decisions
        self.predicted_tokens = 0  # that the groups chosen were taken to have
        self.pairs = PairTable(clock)

    def choose(
        self,
        request: GenerateRequest,
        chains: BlockChains,
        links: Mapping[GroupId, PlacedGroup],
        prefill: Mapping[GroupId, PlacedGroup] | None = None,
        *,
        is_retry: bool = False,
    ) -> Decision:
        """Ranks the groups, which are not none; charges nothing. `prefill` groups only compute prompts."""
        prefill = prefill or {}
        matches = self._matches(request, chains, {**links, **prefill})
        now_s = self._clock()
        loads = [link.load.view(now_s, link.silent_s) for link in links.values()]
        self._turn += 1
        view = _view(request, chains, self._turn)
        sources = self._sources(request, chains, links, prefill, now_s)
        if sources is None:
            ranked = rank(view, loads, matches, self._policy)
        else:
            ranked = rank_with_sources(view, loads, matches, sources, self._policy)
        decision = Decision(
            request_id=request.request_id,
            ranked=ranked,
            matches=matches,
            num_prompt_tokens=len(known_tokens(request)),
            is_retry=is_retry,
        )
        self._decisions[request.request_id] = decision
        self._decisions.move_to_end(request.request_id)
        if len(self._decisions) > self._max_decisions:
            self._decisions.popitem(last=False)
        return decision

    def charge(self, decision: Decision, wire_id: RequestId, chains: BlockChains, link: PlacedGroup) -> None:
        """Counts the request to the best group until its own stats do, and its blocks as being made there."""
        cached = self.cached_tokens(decision, link)
        self.predicted_tokens += cached
        self.reasons[_reason(decision, cached)] += 1
        self._charge(decision, wire_id, chains, link, decision.ranked[0].fetched_tokens)

    def charge_prompt(
        self, decision: Decision, wire_id: RequestId, chains: BlockChains, link: PlacedGroup
    ) -> None:
        """The same for a prefill group that is to compute the prompt."""
        self._charge(decision, wire_id, chains, link, 0)

    def cached_tokens(self, decision: Decision, link: PlacedGroup) -> int:
        """What the group was taken to have of the prompt."""
        matched = decision.matches.get(link.info.group_id, 0)
        return split_prompt(decision.num_prompt_tokens, link.info.block_size, matched).cached

    def explain(self, request_id: RequestId) -> Decision | None:
        """The decision of one of the last requests."""
        return self._decisions.get(request_id)

    def _charge(
        self, decision: Decision, wire_id: RequestId, chains: BlockChains, link: PlacedGroup, fetched: int
    ) -> None:
        """`fetched`: prompt tokens that the group reads instead of computing them."""
        uncached = decision.num_prompt_tokens - self.cached_tokens(decision, link)
        link.load.on_sent(wire_id, uncached - fetched, self._clock(), is_timed=not fetched)
        self._index.expect(link.info.group_id, chains.get(link.info.block_size, ()))

    def _sources(
        self,
        request: GenerateRequest,
        chains: BlockChains,
        links: Mapping[GroupId, PlacedGroup],
        prefill: Mapping[GroupId, PlacedGroup],
        now_s: float,
    ) -> Sources | None:
        """Groups whose blocks could be read; None when there is nothing to read, or nobody to read from."""
        if request.sampling.num_prompt_logprobs is not None:
            return None  # the engine computes every row of such a prompt
        if 0 not in request.choices():
            return None  # only its first chunk would tell what was read
        num = len(known_tokens(request))
        able = [link for link in links.values() if link.info.exchanges_kv]
        if not any(whole_block_tokens(num, link.info.block_size) for link in able):
            return None
        computing = [
            link.load.view(now_s, link.silent_s)
            for link in prefill.values()
            if link.info.exchanges_kv and num <= _max_prompt_tokens(link.info)
        ]
        cached: dict[GroupId, int] = {}
        if self._policy.pull and len(able) > 1:
            surely = self._leading(self._index.match_exact, chains)
            cached = {link.info.group_id: surely.get(link.info.group_id, 0) for link in able}
        if not computing and not any(cached.values()):
            return None
        present = {**links, **prefill}
        for link in able:
            self.pairs.hear(link.info, link.load.stats.kv_sources, present)
        return Sources(
            prefill=computing, cached=cached, bytes_per_s=self.pairs.rates(), barred=self.pairs.barred()
        )

    def _matches(
        self, request: GenerateRequest, chains: BlockChains, links: Mapping[GroupId, PlacedGroup]
    ) -> dict[GroupId, int]:
        if request.sampling.num_prompt_logprobs is not None:
            return {}  # the engine computes every row of such a prompt
        return {
            group_id: count
            for group_id, count in self._leading(self._index.match, chains).items()
            if group_id in links
        }

    @staticmethod
    def _leading(
        match: Callable[[Sequence[BlockHash]], dict[GroupId, int]], chains: BlockChains
    ) -> dict[GroupId, int]:
        """Leading blocks of the prompt by group. Blocks of another size have other hashes, so of all chains
        at most one, that of its own block size, is found in a group."""
        found: dict[GroupId, int] = {}
        for chain in chains.values():
            for group_id, count in match(chain).items():
                if count or group_id not in found:
                    found[group_id] = count
        return found


def _reason(decision: Decision, cached_tokens: int) -> DecisionReason:
    """Why the first of the ranking is the first."""
    if decision.is_retry:
        return DecisionReason.RETRY
    if decision.ranked[0].source is not None:
        return DecisionReason.SOURCE
    return DecisionReason.PREFIX if cached_tokens else DecisionReason.LOAD


def _max_prompt_tokens(info: GroupInfo) -> int:
    return min(info.max_model_len, info.num_blocks * info.block_size)


def known_tokens(request: GenerateRequest) -> tuple[int, ...]:
    """What a group has to have before it makes a token: the prompt, to which belongs, for a request that was
    moved, what its first choice has got so far."""
    return request.prompt_token_ids + (request.begun[0].token_ids if request.begun else ())


async def hash_prompt(request: GenerateRequest, block_sizes: Iterable[int]) -> BlockChains:
    """Hashes of the prompt's full blocks, for each block size in use."""
    sizes = set(block_sizes)
    if len(known_tokens(request)) > _HASH_IN_THREAD_TOKENS:
        return await asyncio.to_thread(_hash_prompt, request, sizes)
    return _hash_prompt(request, sizes)


def _hash_prompt(request: GenerateRequest, sizes: Iterable[int]) -> BlockChains:
    tokens = known_tokens(request)
    return {size: block_hashes(tokens, size, request.cache_salt) for size in sizes}


def _view(request: GenerateRequest, chains: BlockChains, turn: int) -> RequestView:
    chain: Sequence[BlockHash] = next(iter(chains.values()), ())
    choices = request.choices()
    return RequestView(
        num_prompt_tokens=len(known_tokens(request)),
        max_output_tokens=sum(request.sampling.max_tokens - len(begun) for begun in choices.values()),
        num_choices=len(choices),
        spread_key=chain[-1] if chain else request.request_id.encode("utf-8", "replace"),
        turn=turn,
    )
