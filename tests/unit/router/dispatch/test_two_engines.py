"""Two pools over the real engine and its loop: prompts computed in one, answered in the other, blocks carried
between the toy models' memories by a thread of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router.dispatch.dispatcher import SocketDispatcher
from router.routing.policy import PlacementPolicy, PolicyConfig
from tests.unit.data_plane.fakes import FAST, FAST_SERVER, SECRET, collect, info, run, tokens, until
from tests.unit.engine.toy import VOCAB, reference
from tests.unit.engine.toy_reference import reference_search
from tests.unit.exchange.world import Memory
from workers.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.server import StreamServer
from workers.data_plane.submit import SubmitClient
from workers.decoding.drafter import METHODS, MODEL_METHODS
from workers.engine.engine import Engine
from workers.engine.exchange import (
    CloseLease,
    ExchangeCommand,
    ExchangeSetup,
    Offered,
    OpenLease,
    Pulled,
    Redirect,
    SourceLost,
)
from workers.engine.leases import LeaseId
from workers.engine.loop import EngineLoop
from workers.engine.request import EngineLimits
from workers.hashing import BlockHash
from workers.types import (
    BeamParams,
    BlockOffer,
    BlockRead,
    GenerateRequest,
    GroupAddress,
    GroupId,
    KVSource,
    RequestId,
    Role,
    SamplingParams,
)

BLOCK_SIZE, NUM_BLOCKS = 4, 120
LIMITS = replace(FAST, send_timeout_s=5.0)  # sixty at once on a busy machine
POLICY = PolicyConfig(policy=PlacementPolicy.ROUND_ROBIN)
NO_GUESSES = SpeculativeConfig()


@dataclass(eq=False)
class Wired:
    """A group and its end of the wire to the others; implements `workers.engine.fetch.KVPeers`."""

    name: str
    groups: dict[str, Wired]  # those that can be reached
    carrier: ThreadPoolExecutor
    memory: Memory = field(default_factory=lambda: Memory(NUM_BLOCKS, BLOCK_SIZE))
    readers: dict[LeaseId, tuple[Wired, int]] = field(default_factory=dict)
    leases: dict[int, tuple[Wired, LeaseId]] = field(default_factory=dict)
    engine: Engine = field(init=False)
    loop: EngineLoop = field(init=False)
    server: StreamServer = field(init=False)
    address: GroupAddress = field(init=False)
    front: SubmitClient = field(init=False)

    async def start(self, role: Role, speculative: SpeculativeConfig) -> None:
        self.engine = Engine(
            limits=EngineLimits(vocab_size=VOCAB, max_model_len=400, eos_token_ids=(0,)),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
            schedule=ScheduleConfig(max_step_tokens=32),
            executor=self.memory,
            speculative=speculative,
            exchange=ExchangeSetup(peers=self, on_offer=self._on_offer),
        )
        described = replace(
            info(self.name, num_blocks=NUM_BLOCKS), role=role, exchanges_kv=True, vocab_size=VOCAB
        )
        self.server = StreamServer(
            info=described,
            secret=SECRET,
            limits=FAST_SERVER,
            on_redirect=lambda request_id, source: self.exchange(Redirect(request_id, source)),
        )
        self.loop = EngineLoop(self.engine, self.server.on_output)
        host, port = await self.server.start(self.loop, "127.0.0.1")
        self.loop.start()
        self.front = SubmitClient(
            ClientIdentity(client_id=f"front-{self.name}", secret=SECRET, subscribes=False)
        )
        await self.front.connect(host, port)
        self.address = GroupAddress(
            group_id=GroupId(self.name), replica_id=self.name, host=host, port=port, role=role, epoch=1
        )

    async def stop(self) -> None:
        self.front.close()
        await asyncio.to_thread(self.loop.stop, 5.0)
        await self.server.stop("the test ends")

    def exchange(self, command: ExchangeCommand) -> None:
        self.loop.exchange(command)

    def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
        target = self.groups.get(source.group_id)
        if target is None:
            self.carrier.submit(self.exchange, SourceLost(fetch_id, "not there"))
            return
        lease_id = LeaseId(f"{self.name}/{fetch_id}")
        self.leases[fetch_id] = (target, lease_id)
        target.readers[lease_id] = (self, fetch_id)
        self.carrier.submit(target.exchange, OpenLease(lease_id, tuple(hashes), source.transfer_id))

    def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
        source, _ = self.leases[fetch_id]
        self.carrier.submit(self._carry, source, pull_id, list(blocks))

    def close(self, fetch_id: int) -> None:
        if fetch_id in self.leases:
            target, lease_id = self.leases.pop(fetch_id)
            self.carrier.submit(target.exchange, CloseLease(lease_id))

    def _carry(self, source: Wired, pull_id: int, blocks: list[BlockRead]) -> None:
        for pulled in blocks:
            contents = source.memory.read(pulled.source)
            if source.engine.generations[pulled.source] != pulled.generation:
                self.exchange(Pulled(pull_id, "changed"))
                return
            self.memory.write(pulled.own, 0, contents)
        self.exchange(Pulled(pull_id))

    def _on_offer(self, lease_id: LeaseId, offers: tuple[BlockOffer, ...], is_complete: bool) -> None:
        reader, fetch_id = self.readers[lease_id]
        self.carrier.submit(reader.exchange, Offered(fetch_id, offers, is_complete))


@dataclass
class Wires:
    groups: dict[str, Wired]
    router: SocketDispatcher

    async def until_idle(self) -> None:
        """Every block can be had again, on both sides."""
        await until(lambda: not any(group.engine.has_work() for group in self.groups.values()))
        for group in self.groups.values():
            await until(lambda: group.engine.stats().active_blocks == 0)  # noqa: B023
            await until(lambda: group.server.num_requests == 0)  # noqa: B023
            group.engine.check_integrity()


@asynccontextmanager
async def wired(policy: PolicyConfig, speculative: SpeculativeConfig, **roles: Role) -> AsyncIterator[Wires]:
    """Groups by name, and a router whose clock stands still: it keeps the rates it supposes."""
    groups: dict[str, Wired] = {}
    with ThreadPoolExecutor(1) as carrier:
        async with AsyncExitStack() as stack:
            for name, role in roles.items():
                groups[name] = Wired(name, groups, carrier)
                await groups[name].start(role, speculative)
                stack.push_async_callback(groups[name].stop)
            everyone = dict(groups)

            async def source() -> Sequence[GroupAddress]:
                return [group.address for group in everyone.values()]

            async def send(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
                await everyone[order[0]].front.submit(client_id, wanted)
                return order[0]

            router = SocketDispatcher(
                secret=SECRET, source=source, send=send, policy=policy, limits=LIMITS, clock=lambda: 0.0
            )
            await router.start()
            stack.push_async_callback(router.stop)
            await until(lambda: sum(state.is_ready for state in router.groups()) == len(everyone))
            yield Wires(groups, router)


def with_wires(
    test: Callable[[Wires], Coroutine[Any, Any, None]],
    policy: PolicyConfig = POLICY,
    speculative: SpeculativeConfig = NO_GUESSES,
    **roles: Role,
) -> None:
    async def body() -> None:
        async with wired(policy, speculative, **roles) as wires:
            await test(wires)

    run(body(), 20.0)


def ask(name: str, prompt: Sequence[int], **changes: object) -> GenerateRequest:
    sampling = replace(SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True), **changes)  # type: ignore[arg-type]  # fields by name
    return GenerateRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling)


def prompt_of(seed: int, length: int) -> list[int]:
    return [1 + (seed * 31 + i * i) % (VOCAB - 1) for i in range(length)]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 30, 33, 100])
def test_prompts_of_every_length_are_read_and_answered_right(length: int) -> None:
    async def test(wires: Wires) -> None:
        whole = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        wanted = replace(ask("r", prompt_of(1, length)), num_choices=3)
        chunks = await collect(wires.router, wanted)
        for choice in range(3):
            assert tokens(chunks, choice) == reference(wanted, choice)
        assert next(chunk.num_cached_tokens for chunk in chunks if chunk.choice == 0) == 0
        assert wires.router.fetch_counts().pulled_tokens == whole
        assert wires.groups["d"].engine.stats().kv_fetched_tokens_total == whole
        again = await collect(wires.router, replace(ask("again", prompt_of(1, length)), num_choices=1))
        assert tokens(again) == reference(ask("again", prompt_of(1, length)), 0)
        assert again[0].num_cached_tokens == whole
        await wires.until_idle()

    with_wires(test, p=Role.PREFILL, d=Role.DECODE)


def test_a_beam_search_reads_its_prompt_and_goes_on_alone() -> None:
    async def test(wires: Wires) -> None:
        wanted = ask("r", prompt_of(1, 33), temperature=0.0)
        wanted = replace(wanted, num_choices=2, beam=BeamParams(width=4))
        begun, *chunks = await collect(wires.router, wanted)
        assert (begun.token_ids, begun.num_cached_tokens) == ((), 0)
        assert wires.router.fetch_counts().pulled_tokens == 32
        assert [(chunk.token_ids, chunk.score) for chunk in chunks] == [
            (found.token_ids, found.score) for found in reference_search(wanted)
        ]
        assert wires.groups["d"].engine.stats().kv_fetched_tokens_total == 32
        await wires.until_idle()

    with_wires(test, p=Role.PREFILL, d=Role.DECODE)


@pytest.mark.parametrize("method", [*METHODS, *MODEL_METHODS])
def test_prompts_are_read_and_their_answers_guessed(method: str) -> None:
    """What guesses leave in blocks is as good as without: the next turn finds them there, or reads them."""

    async def test(wires: Wires) -> None:
        engine = wires.groups["d"].engine
        first = [ask(f"r{i}", prompt_of(i, 30 + i), max_tokens=70, top_k=2, seed=i) for i in range(2)]
        answers = await asyncio.gather(*(collect(wires.router, request) for request in first))
        assert [tokens(chunks) for chunks in answers] == [reference(request) for request in first]
        stats = engine.stats()
        assert stats.kv_fetched_tokens_total == 28 + 28
        assert 0 < stats.accepted_tokens_total < stats.drafted_tokens_total
        for request, chunks in zip(first, answers, strict=True):
            turn = [*request.prompt_token_ids, *tokens(chunks), 5]
            second = ask(f"{request.request_id}-2", turn, max_tokens=40, top_k=2, temperature=0.0)
            found = await collect(wires.router, second)
            assert tokens(found) == reference(second)
            assert found[0].num_cached_tokens >= len(turn) - 2 * BLOCK_SIZE
        await wires.until_idle()

    guesses = SpeculativeConfig(method=method, max_draft_tokens=5)
    with_wires(test, speculative=guesses, p=Role.PREFILL, d=Role.DECODE)


def test_many_requests_over_three_pools_are_answered_right() -> None:
    async def test(wires: Wires) -> None:
        wanted = [
            replace(ask(f"r{i}", prompt_of(i % 7, 10 + 9 * (i % 9)), seed=i), num_choices=1 + i % 2)
            for i in range(60)
        ]
        answers = await asyncio.gather(*(collect(wires.router, request) for request in wanted))
        for request, chunks in zip(wanted, answers, strict=True):
            for choice in range(request.num_choices):
                assert tokens(chunks, choice) == reference(request, choice)
        counts = wires.router.fetch_counts()
        assert counts.sources == {"prefill": 60}
        assert counts.pulled_tokens > 0
        await wires.until_idle()

    with_wires(test, d1=Role.DECODE, d2=Role.UNIFIED, p1=Role.PREFILL, p2=Role.PREFILL)


def test_clients_that_leave_at_any_point_strand_nothing() -> None:
    async def test(wires: Wires) -> None:
        neighbour = ask("neighbour", prompt_of(99, 60), max_tokens=200)
        undisturbed = asyncio.create_task(collect(wires.router, neighbour))
        tasks = []
        for i in range(60):
            wanted = ask(f"r{i}", prompt_of(i, 80), max_tokens=100)
            tasks.append(asyncio.create_task(collect(wires.router, wanted)))
            if i % 4 == 3:
                await asyncio.sleep(0.002 * (i % 5))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                tasks.clear()
        assert tokens(await undisturbed) == reference(neighbour, 0)
        await wires.until_idle()
        big = ask("big", prompt_of(5, 300), max_tokens=90)
        assert tokens(await collect(wires.router, big)) == reference(big, 0)
        await wires.until_idle()

    with_wires(test, p=Role.PREFILL, d=Role.DECODE)


def test_a_source_that_is_out_of_reach_costs_time_only() -> None:
    async def test(wires: Wires) -> None:
        wires.groups.pop("p")
        wanted = ask("r", prompt_of(3, 90))
        assert tokens(await collect(wires.router, wanted)) == reference(wanted, 0)
        counts = wires.router.fetch_counts()
        assert (counts.pulled_tokens, counts.recomputed_tokens) == (0, 88)

    with_wires(test, p=Role.PREFILL, d=Role.DECODE)


def test_a_neighbour_that_has_the_prompt_cached_is_read_from() -> None:
    takes_turns = PolicyConfig(balance_tokens=5000.0, max_balance_tokens=1e6)  # rather than follow the cache

    async def test(wires: Wires) -> None:
        first, second = ask("first", prompt_of(4, 200)), ask("second", prompt_of(4, 230), seed=7)
        assert tokens(await collect(wires.router, first)) == reference(first, 0)
        decision = wires.router.explain(RequestId("first"))
        assert decision is not None and decision.taken_by is not None
        owner = decision.taken_by
        await until(lambda: len(wires.router.index.blocks(owner)) >= 50)
        chunks = await collect(wires.router, second)
        assert tokens(chunks) == reference(second, 0)
        assert chunks[0].num_cached_tokens == 200
        decision = wires.router.explain(RequestId("second"))
        assert decision is not None and decision.fetch is not None
        assert decision.taken_by not in (None, owner)
        assert (decision.fetch.source, decision.fetch.pulled_tokens) == (owner, 200)
        assert wires.router.fetch_counts().sources == {"none": 1, "neighbour": 1}
        await wires.until_idle()

    with_wires(test, takes_turns, u1=Role.UNIFIED, u2=Role.UNIFIED)
