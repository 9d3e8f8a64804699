"""Ranks the groups for a request with all that this router knows, and remembers why.

The bridge between what is live (links, prefix index) and the pure `router.policy`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from router.dispatch import Decision
from router.link import GroupLink
from router.policy import PolicyConfig, RequestView, rank, split_prompt
from router.prefix_index import PrefixIndex
from workers.hashing import BlockHash, block_hashes
from workers.types import GenerateRequest, GroupId, RequestId

_HASH_IN_THREAD_TOKENS = 16_384  # longer prompts are hashed off the event loop

BlockChains = Mapping[int, Sequence[BlockHash]]  # block size -> hashes of the prompt's full blocks


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

    def choose(
        self, request: GenerateRequest, chains: BlockChains, links: Mapping[GroupId, GroupLink], attempt: int
    ) -> Decision:
        """Ranks the groups, which are not none; charges nothing."""
        matches = self._matches(request, chains, links)
        now_s = self._clock()
        loads = [link.load.view(now_s, link.silent_s) for link in links.values()]
        self._turn += 1
        ranked = rank(_view(request, chains, self._turn), loads, matches, self._policy)
        decision = Decision(
            request_id=request.request_id,
            num_attempts=attempt,
            ranked=ranked,
            matches=matches,
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        self._decisions[request.request_id] = decision
        self._decisions.move_to_end(request.request_id)
        if len(self._decisions) > self._max_decisions:
            self._decisions.popitem(last=False)
        return decision

    def charge(self, decision: Decision, wire_id: RequestId, chains: BlockChains, link: GroupLink) -> None:
        """Counts the request to the group until its own stats do, and its blocks as being made there."""
        info = link.info
        matched = decision.matches.get(info.group_id, 0)
        uncached = split_prompt(decision.num_prompt_tokens, info.block_size, matched).uncached
        link.load.on_sent(wire_id, uncached, self._clock())
        self._index.expect(info.group_id, chains.get(info.block_size, ()))

    def explain(self, request_id: RequestId) -> Decision | None:
        """The decision of one of the last requests."""
        return self._decisions.get(request_id)

    def _matches(
        self, request: GenerateRequest, chains: BlockChains, links: Mapping[GroupId, GroupLink]
    ) -> dict[GroupId, int]:
        if request.sampling.num_prompt_logprobs is not None:
            return {}  # the engine computes every row of such a prompt
        return {
            group_id: count
            for size, chain in chains.items()
            for group_id, count in self._index.match(chain).items()
            if group_id in links and links[group_id].info.block_size == size
        }


async def hash_prompt(request: GenerateRequest, block_sizes: Iterable[int]) -> BlockChains:
    """Hashes of the prompt's full blocks, for each block size in use."""
    sizes = set(block_sizes)
    if len(request.prompt_token_ids) > _HASH_IN_THREAD_TOKENS:
        return await asyncio.to_thread(_hash_prompt, request, sizes)
    return _hash_prompt(request, sizes)


def _hash_prompt(request: GenerateRequest, sizes: Iterable[int]) -> BlockChains:
    return {size: block_hashes(request.prompt_token_ids, size, request.cache_salt) for size in sizes}


def _view(request: GenerateRequest, chains: BlockChains, turn: int) -> RequestView:
    chain: Sequence[BlockHash] = next(iter(chains.values()), ())
    return RequestView(
        num_prompt_tokens=len(request.prompt_token_ids),
        max_output_tokens=request.sampling.max_tokens * request.num_choices,
        num_choices=request.num_choices,
        spread_key=chain[-1] if chain else request.request_id.encode("utf-8", "replace"),
        turn=turn,
    )
