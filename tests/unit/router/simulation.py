"""Groups and conversations in virtual time, placed by the router's real code.

A group is its step loop without the model: a token budget, decode rows first, prompt chunks in order of
arrival, blocks that become reusable when they are full, eviction of the least recently used, numbered events.
A step lasts `base + per prompt token + per row`, with figures of a small model on two CPU cores.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from router.dispatch.link import GroupLink
from router.dispatch.placement import Placement
from router.routing.load import LoadTracker
from router.routing.policy import PlacementPolicy, PolicyConfig
from router.routing.prefix_index import PrefixIndex
from workers.hashing import BlockHash, block_hashes
from workers.types import (
    BlockEvent,
    BlockEventKind,
    GenerateRequest,
    GroupId,
    GroupInfo,
    GroupStats,
    RequestId,
    Role,
    SamplingParams,
)

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 512
STATS_PERIOD_S = 0.05


class Speed(NamedTuple):
    """Length of a step."""

    base_s: float
    per_prompt_token_s: float
    per_row_s: float


SMALL_MODEL = Speed(base_s=0.015, per_prompt_token_s=0.00025, per_row_s=0.0006)


class World:
    """Virtual time and what happens in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, action))

    def run(self) -> None:
        while self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()

    def clock(self) -> float:
        return self.now_s


@dataclass
class Job:
    """A request on a group."""

    request: GenerateRequest
    answer: Sequence[int]
    on_end: Callable[[], None]
    arrived_s: float
    chain: list[BlockHash]
    num_computed: int = 0  # prompt tokens in the pool
    num_cached: int = 0
    num_new: int = 0
    has_started: bool = False
    first_token_s: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.answer[: self.num_new])


class SimGroup:
    """One group with `num_blocks` blocks of cache."""

    def __init__(self, world: World, name: str, num_blocks: int, speed: Speed) -> None:
        self.info = GroupInfo(
            group_id=GroupId(name), epoch=1, role=Role.UNIFIED, model="m", model_hash="", dtype="bfloat16",
            kv_dtype="bfloat16",
            tensor_parallel=1, vocab_size=50_000, max_model_len=8192, block_size=BLOCK_SIZE,
            num_blocks=num_blocks, kv_bytes_per_block=1,
        )  # fmt: skip
        self.load = LoadTracker(self.info.group_id, BLOCK_SIZE, num_blocks)
        self.silent_s = 0.0
        self.jobs: list[Job] = []
        self.num_requests = 0
        self.work_tokens = 0  # prompt tokens computed and new tokens made
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.index: PrefixIndex | None = None
        self.on_token: Callable[[Job], None] = lambda job: None
        self._world = world
        self._speed = speed
        self._cached: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first
        self._number = 0
        self._is_running = False
        self._mean_step_s = 0.0
        self._num_steps = 0
        self._stats_s = float("-inf")

    def submit(self, job: Job) -> None:
        self.num_requests += 1
        self.prompt_tokens += len(job.request.prompt_token_ids)
        self.jobs.append(job)
        if not self._is_running:
            self._is_running = True
            self._begin_step()

    def _begin_step(self) -> None:
        rows = [job for job in self.jobs if job.first_token_s]
        budget = MAX_STEP_TOKENS - len(rows)
        chunks: list[tuple[Job, int]] = []
        in_work: set[BlockHash] = set()
        for job in self.jobs:
            if job.first_token_s or budget <= 0:
                continue
            if not job.has_started and not self._start(job, in_work):
                continue
            size = min(budget, len(job.request.prompt_token_ids) - job.num_computed)
            chunks.append((job, size))
            budget -= size
            in_work.update(job.chain)
        num_prompt = sum(size for _, size in chunks)
        speed = self._speed
        step_s = speed.base_s + speed.per_prompt_token_s * num_prompt + speed.per_row_s * len(rows)
        self._mean_step_s += 0.1 * (step_s - self._mean_step_s) if self._num_steps else step_s
        self._world.after(step_s, lambda: self._end_step(rows, chunks))

    def _start(self, job: Job, in_work: set[BlockHash]) -> bool:
        """Takes what is cached; waits when another request is just making the next block."""
        usable = job.chain[: (len(job.request.prompt_token_ids) - 1) // BLOCK_SIZE]
        count = next((i for i, block in enumerate(usable) if block not in self._cached), len(usable))
        if count < len(usable) and usable[count] in in_work:
            return False
        for block in usable[:count]:
            self._cached.move_to_end(block)
        job.has_started = True
        job.num_computed = job.num_cached = count * BLOCK_SIZE
        self.cached_tokens += job.num_cached
        return True

    def _end_step(self, rows: list[Job], chunks: list[tuple[Job, int]]) -> None:
        self._num_steps += 1
        stored: list[BlockHash] = []
        finished = []
        for job, size in chunks:
            job.num_computed += size
            self.work_tokens += size
            stored += job.chain[: job.num_computed // BLOCK_SIZE]
            if job.num_computed == len(job.request.prompt_token_ids):
                job.first_token_s = self._world.now_s
                rows = [*rows, job]
                self.on_token(job)
        for job in rows:
            job.num_new += 1
            self.work_tokens += 1
            if job.num_new == len(job.answer):
                finished.append(job)
                stored += block_hashes(job.tokens[:-1], BLOCK_SIZE)
        self._store(stored)
        self.jobs = [job for job in self.jobs if job not in finished]
        self._report(force=not self.jobs)
        for job in finished:
            job.on_end()
        if self.jobs:
            self._begin_step()
        else:
            self._is_running = False

    def _store(self, hashes: list[BlockHash]) -> None:
        new = [block for block in dict.fromkeys(hashes) if block not in self._cached]
        self._cached.update(dict.fromkeys(new))
        gone = [self._cached.popitem(last=False)[0] for _ in range(len(self._cached) - self.info.num_blocks)]
        for kind, changed in ((BlockEventKind.STORED, new), (BlockEventKind.REMOVED, gone)):
            if changed and self.index is not None:
                self._number += 1
                event = BlockEvent(number=self._number, kind=kind, block_hashes=tuple(changed))
                assert self.index.apply(self.info.group_id, [event])

    def _report(self, *, force: bool) -> None:
        if not force and self._world.now_s - self._stats_s < STATS_PERIOD_S:
            return
        self._stats_s = self._world.now_s
        uncomputed = [len(j.request.prompt_token_ids) - j.num_computed for j in self.jobs]
        self.load.on_stats(
            GroupStats(
                num_running=sum(job.has_started for job in self.jobs),
                num_waiting=sum(not job.has_started for job in self.jobs),
                waiting_tokens=sum(uncomputed),
                free_blocks=self.info.num_blocks - len(self._cached),
                cached_blocks=len(self._cached),
                num_steps=self._num_steps,
                step_seconds=self._mean_step_s,
            )
        )


class SimRouter:
    """Places with the production code; hands over without delay."""

    def __init__(self, world: World, groups: Sequence[SimGroup], policy: PlacementPolicy) -> None:
        self._world = world
        self._groups = {group.info.group_id: group for group in groups}
        self._index = PrefixIndex(clock=world.clock)
        self._placement = Placement(
            index=self._index, policy=PolicyConfig(policy=policy), clock=world.clock, max_decisions=10
        )
        self.placed: list[GroupId] = []
        self.waits_s: list[float] = []
        for group in groups:
            self._index.add_group(group.info.group_id, group.info.num_blocks + 1000)
            self._index.load_snapshot(group.info.group_id, 0, ())
            group.index = self._index
            group.on_token = lambda job, load=group.load: self._first_token(job, load)  # type: ignore[misc]

    def generate(self, request: GenerateRequest, answer: Sequence[int], on_end: Callable[[], None]) -> None:
        chains = {BLOCK_SIZE: block_hashes(request.prompt_token_ids, BLOCK_SIZE)}
        links = cast("dict[GroupId, GroupLink]", self._groups)
        decision = self._placement.choose(request, chains, links)
        best = decision.ranked[0].group_id
        group = self._groups[best]
        self._placement.charge(decision, request.request_id, chains, cast("GroupLink", group))
        group.load.on_accepted(request.request_id)
        self.placed.append(best)

        def ended() -> None:
            group.load.on_ended(request.request_id)
            on_end()

        group.submit(Job(request, answer, ended, self._world.now_s, chains[BLOCK_SIZE]))

    def _first_token(self, job: Job, load: LoadTracker) -> None:
        self.waits_s.append(self._world.now_s - job.arrived_s)
        load.on_token(job.request.request_id, self._world.now_s)


@dataclass
class Work:
    """Requests in chains: each one is sent when the one before it in its chain has been answered."""

    chains: list[list[tuple[list[int], list[int]]]]  # (prompt, answer)
    max_concurrent: int
    pause_s: float = 0.0


class Outcome(NamedTuple):
    """What a run came to."""

    cached_tokens: int
    prompt_tokens: int
    requests: dict[GroupId, int]
    work_tokens: dict[GroupId, int]
    seconds: float
    waits_s: list[float]
    placed: list[GroupId]

    @property
    def request_ratio(self) -> float:
        return max(self.requests.values()) / max(min(self.requests.values()), 1)

    @property
    def work_ratio(self) -> float:
        return max(self.work_tokens.values()) / max(min(self.work_tokens.values()), 1)


def simulate(
    work: Work,
    policy: PlacementPolicy,
    *,
    num_groups: int = 2,
    num_blocks: int = 8192,
    speed: Speed = SMALL_MODEL,
) -> Outcome:
    """Runs the work to its end."""
    world = World()
    groups = [SimGroup(world, f"g{i}", num_blocks, speed) for i in range(num_groups)]
    router = SimRouter(world, groups, policy)
    waiting = list(enumerate(work.chains))

    def next_chain() -> None:
        if waiting:
            number, chain = waiting.pop(0)
            turn(number, chain, 0)

    def turn(number: int, chain: list[tuple[list[int], list[int]]], position: int) -> None:
        if position == len(chain):
            next_chain()
            return
        prompt, answer = chain[position]
        request = GenerateRequest(
            request_id=RequestId(f"{number}-{position}"),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=len(answer)),
        )
        router.generate(
            request,
            answer,
            lambda: world.after(work.pause_s, lambda: turn(number, chain, position + 1)),
        )

    for _ in range(work.max_concurrent):
        next_chain()
    world.run()
    return Outcome(
        cached_tokens=sum(group.cached_tokens for group in groups),
        prompt_tokens=sum(group.prompt_tokens for group in groups),
        requests={group.info.group_id: group.num_requests for group in groups},
        work_tokens={group.info.group_id: group.work_tokens for group in groups},
        seconds=world.now_s,
        waits_s=sorted(router.waits_s),
        placed=router.placed,
    )


@dataclass
class Conversations:
    """Conversations; every turn's prompt is all that was said before, and a question."""

    num: int = 40
    turns: int = 4
    system_tokens: int = 1000
    question_tokens: tuple[int, int] = (20, 120)
    answer_tokens: tuple[int, int] = (30, 100)
    is_shared: bool = True  # one system prompt for all, or one each
    seed: int = 0

    def chains(self) -> list[list[tuple[list[int], list[int]]]]:
        draw = random.Random(self.seed)

        def some(limits: tuple[int, int]) -> list[int]:
            return [draw.randrange(50_000) for _ in range(draw.randint(*limits))]

        system = some((self.system_tokens, self.system_tokens))
        conversations = []
        for _ in range(self.num):
            said, turns = system if self.is_shared else some((self.system_tokens, self.system_tokens)), []
            for _ in range(self.turns):
                said = said + some(self.question_tokens)
                answer = some(self.answer_tokens)
                turns.append((said, answer))
                said = said + answer
            conversations.append(turns)
        return conversations
