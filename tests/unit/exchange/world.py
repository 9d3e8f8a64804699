"""Groups joined by a transport that a test schedules: real engines, one virtual clock, no threads.

Whatever one group says to another lies in `World.messages` until the test delivers it: late, in any order,
twice, or never. Bytes move in `World.copies`, half a block at a time and whenever the test says so, straight
from the pool of one group's toy executor into the other's, so a block that is reused too early is really
written over. Every content of the toy depends on its whole history: `check()` compares each block that can be
found by its hash with what the tokens of that hash give, and `check_answers()` every token with a run without
blocks.

A group that dies keeps its pool's memory (others may still read there until they notice) and hears nothing.
The one that is started in its place has the same name and may be given the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.unit.engine.toy import ToyExecutor, Transcript, contents_of, reference
from workers.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from workers.engine.engine import Engine
from workers.engine.exchange import (
    CloseLease,
    ExchangeCommand,
    ExchangeSetup,
    KVExchange,
    Offered,
    OpenLease,
    Pulled,
    SourceLost,
)
from workers.engine.leases import LeaseId
from workers.engine.request import EngineLimits
from workers.engine.step import StepPlan, StepResult
from workers.hashing import BlockHash, block_hashes
from workers.types import (
    BlockOffer,
    BlockRead,
    FinishReason,
    GenerateRequest,
    GroupId,
    KVSource,
    RequestId,
    RequestRefused,
)

VOCAB = 97
HEARTBEAT_S = 2.0


class Memory(ToyExecutor):
    """The toy executor, with a way for transfers into and out of its pool; zeroes blocks when told to."""

    def compute(self, plan: StepPlan) -> StepResult:
        for block in plan.zero_blocks:
            self.write(block, 0, [None] * self._block_size)  # nobody may read it now
        return super().compute(plan)

    def read(self, block: int) -> list[int | None]:
        return self._pool[block * self._block_size : (block + 1) * self._block_size]

    def write(self, block: int, offset: int, contents: Sequence[int | None]) -> None:
        start = block * self._block_size + offset
        self._pool[start : start + len(contents)] = contents


@dataclass
class Message:
    """A command on its way to a group."""

    target: Group
    command: ExchangeCommand


@dataclass
class Copy:
    """A pull under way: half a block at each step of it."""

    world: World
    reader: Group
    source: Group
    pull_id: int
    blocks: list[BlockRead]
    num_halves: int = 0

    def advance(self) -> None:
        """Moves half a block; at the end, or when it cannot go on, says so to the reader."""
        if self.world.reads_by_name:
            self.source = self.world.groups[self.source.name]
        pulled = self.blocks[self.num_halves // 2]
        is_second = self.num_halves % 2 == 1
        half = self.reader.block_size // 2 if self.reader.block_size > 1 else 1
        where = slice(half, None) if is_second else slice(0, half)
        if self.source.is_dead:
            self.end("the source is gone")
        elif not self.is_current(pulled):
            self.end(f"block {pulled.source} has changed")
        else:
            contents = self.source.memory.read(pulled.source)[where]
            self.reader.memory.write(pulled.own, where.start, contents)
            self.num_halves += 1
            if is_second and not self.is_current(pulled):
                self.end(f"block {pulled.source} has changed")
            elif self.num_halves == 2 * len(self.blocks):
                self.end(None)

    def is_current(self, pulled: BlockRead) -> bool:
        now = self.source.engine.generations[pulled.source]
        return now == pulled.generation or not self.world.checks_generations

    def end(self, error: str | None) -> None:
        self.world.copies.remove(self)
        self.world.send(self.reader, Pulled(self.pull_id, error))


class Group:
    """One start of a group: an engine, its memory, and the two ends of its connections."""

    def __init__(self, world: World, name: str, number: int, memory: Memory, options: Options) -> None:
        self.world = world
        self.name = name
        self.memory = memory
        self.block_size = options.block_size
        self.number = number  # of this start
        self.is_dead = False
        self.transcript = Transcript()
        self.requests: dict[RequestId, GenerateRequest] = {}
        self.aborted: set[RequestId] = set()
        self.spoiled: set[RequestId] = set()
        self.leases_at: dict[int, tuple[Group, LeaseId]] = {}  # own fetches
        self.readers: dict[LeaseId, tuple[Group, int]] = {}  # of own blocks
        memory.forget_started()  # by the group before it
        self.engine = Engine(
            limits=EngineLimits(vocab_size=VOCAB, max_model_len=4096, eos_token_ids=()),
            cache=CacheConfig(block_size=options.block_size),
            schedule=ScheduleConfig(
                max_step_tokens=options.max_step_tokens,
                max_running=options.max_running,
                max_prefill_chunk=options.max_prefill_chunk,
                expected_output_tokens=options.expected_output_tokens,
                max_waiting=64,
            ),
            executor=memory,
            starter=memory if world.plans_ahead else None,
            speculative=SpeculativeConfig(method=options.guesses),
            clock=lambda: world.now_s,
            exchange=ExchangeSetup(
                peers=self, on_offer=self._on_offer, first_generation=number * world.generations_apart
            ),
        )

    @property
    def exchange(self) -> KVExchange:
        return self.engine._exchange

    @property
    def stats_held(self) -> int:
        return self.engine.stats().active_blocks

    # -- KVPeers

    def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
        target = self.world.groups.get(source.group_id)
        if target is None or target.is_dead:
            self.world.send(self, SourceLost(fetch_id, f"{source.group_id} is not there"))
            return
        lease_id = LeaseId(f"{self.name}#{self.number}/{fetch_id}")
        self.leases_at[fetch_id] = (target, lease_id)
        target.readers[lease_id] = (self, fetch_id)
        self.world.send(target, OpenLease(lease_id, tuple(hashes), source.transfer_id))

    def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
        source, _ = self.leases_at[fetch_id]
        self.world.copies.append(Copy(self.world, self, source, pull_id, list(blocks)))

    def close(self, fetch_id: int) -> None:
        if fetch_id in self.leases_at:
            target, lease_id = self.leases_at.pop(fetch_id)
            self.world.send(target, CloseLease(lease_id))

    def _on_offer(self, lease_id: LeaseId, offers: tuple[BlockOffer, ...], is_complete: bool) -> None:
        if lease_id not in self.readers:
            return
        reader, fetch_id = self.readers[lease_id]
        self.world.send(reader, Offered(fetch_id, offers, is_complete))

    # -- what tests do

    def submit(self, request: GenerateRequest) -> bool:
        """False when the engine refuses."""
        try:
            self.engine.add(request)
        except RequestRefused:
            return False
        self.requests[request.request_id] = request
        self.world.know(request)
        return True

    def abort(self, request_id: RequestId) -> None:
        if self.engine.abort(request_id):
            self.aborted.add(request_id)

    def step(self) -> bool:
        """One turn of the engine's loop without commands. False when there was nothing to compute."""
        self.engine.sweep()
        num_plans = len(self.memory.plans)
        self.transcript.take(self.engine.step())
        return len(self.memory.plans) > num_plans

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left that could be computed now."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"{self.name} goes on after {max_steps} steps")

    def assert_idle(self) -> None:
        """Nothing waits, runs, is fetched or leased, and every block can be had."""
        assert not self.engine.has_work(), f"{self.name} has work: {self.engine.unfinished()}"
        stats = self.engine.stats()
        assert (stats.active_blocks, stats.kv_leases, stats.kv_transferring_blocks) == (0, 0, 0), self.name
        assert stats.free_blocks + stats.cached_blocks == self.memory.num_blocks
        assert len(self.exchange.fetches) == 0
        self.engine.check_integrity()

    def check_answers(self) -> None:
        """Every token is right, and every request has ended that nobody ended early."""
        for request_id, request in self.requests.items():
            for choice in range(request.num_choices):
                expected = reference(request, choice)
                tokens = self.transcript.tokens.get((request_id, choice), [])
                assert tokens == expected[: len(tokens)], f"{request_id}: {tokens}, not {expected}"
                last = self.transcript.last.get((request_id, choice))
                if request_id in self.aborted:
                    continue
                assert last is not None, f"{request_id} has not ended"
                if last.finish_reason is FinishReason.ERROR:
                    assert request_id in self.spoiled, f"{request_id}: {last.error}"
                else:
                    assert tokens == expected


@dataclass(frozen=True)
class Options:
    """Of a group."""

    num_blocks: int = 64
    block_size: int = 4
    max_step_tokens: int = 64
    max_running: int = 16
    max_prefill_chunk: int | None = None
    expected_output_tokens: int = 4
    guesses: str = "none"


@dataclass
class World:
    """The groups, the clock, and everything under way."""

    checks_generations: bool = True
    plans_ahead: bool = False  # all groups
    reads_by_name: bool = False  # a pull reads whoever has the source's name and memory by now
    generations_apart: int = 1 << 40  # between the first ones of two starts
    says_it_lives: bool = True  # a source, to readers that wait for what it computes
    cut_off: set[str] = field(default_factory=set)  # groups whose heartbeats are lost
    now_s: float = 0.0
    groups: dict[str, Group] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    num_started: int = 0
    contents: dict[tuple[int, BlockHash], list[int]] = field(default_factory=dict)
    prepare: Callable[[Group], None] = lambda group: None  # called with each new group

    def start(self, name: str, options: Options | None = None, *, keeps_memory: bool = False) -> Group:
        """A group of this name, instead of the one before."""
        options = options or Options()
        before = self.groups.get(name)
        if before is not None and not before.is_dead:
            self.kill(name)
        if keeps_memory:
            assert before is not None
            memory = before.memory
        else:
            memory = Memory(options.num_blocks, options.block_size)
        self.num_started += 1
        self.groups[name] = group = Group(self, name, self.num_started, memory, options)
        self.prepare(group)
        return group

    def kill(self, name: str, *, is_noticed: bool = True) -> None:
        """The group computes and hears no more. The others' ends of its connections close if is_noticed."""
        group = self.groups[name]
        group.is_dead = True
        self.copies = [copy for copy in self.copies if copy.reader is not group]  # its process wrote
        if not is_noticed:
            return
        for target, lease_id in group.leases_at.values():
            self.send(target, CloseLease(lease_id))
        for reader, fetch_id in group.readers.values():
            if fetch_id in reader.leases_at:
                self.send(reader, SourceLost(fetch_id, f"{name} died"))

    def send(self, target: Group, command: ExchangeCommand) -> None:
        self.messages.append(Message(target, command))

    def deliver(self, index: int = 0) -> ExchangeCommand:
        """Hands over one message."""
        message = self.messages.pop(index)
        if not message.target.is_dead:
            message.target.engine.handle(message.command)
        return message.command

    def deliver_all(self, kind: type[ExchangeCommand] | None = None) -> int:
        """All messages of a kind that lie there, in their order, with those that they bring about."""
        num_delivered = 0
        while indices := [
            i for i, m in enumerate(self.messages) if kind is None or isinstance(m.command, kind)
        ]:
            self.deliver(indices[0])
            num_delivered += 1
        return num_delivered

    def copy_all(self) -> None:
        """All bytes that are ordered."""
        while self.copies:
            self.copies[0].advance()

    def pass_time(self, seconds: float, period_s: float = 1.0) -> None:
        """Lets the clock go on: heartbeats of readers and sources, and the timers of idle engines."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            before_s = self.now_s
            self.now_s = min(end_s, self.now_s + period_s)
            if int(before_s // HEARTBEAT_S) != int(self.now_s // HEARTBEAT_S):
                self.beat()
            for group in list(self.groups.values()):
                if not group.is_dead and group.engine.has_timers():
                    group.engine.sweep()

    def beat(self) -> None:
        for group in self.groups.values():
            if not group.is_dead and group.name not in self.cut_off:
                for target, lease_id in group.leases_at.values():
                    if not target.is_dead:
                        target.engine.renew_lease(lease_id)
                for lease_id in group.exchange.leases._growing if self.says_it_lives else ():
                    reader, fetch_id = group.readers[lease_id]
                    if fetch_id in reader.leases_at:
                        self.send(reader, Offered(fetch_id, (), False))

    def source(self, name: str, transfer_id: str | None = None) -> KVSource:
        return KVSource(group_id=GroupId(name), host="10.0.0.1", port=1, transfer_id=transfer_id)

    def know(self, request: GenerateRequest) -> None:
        """Notes what each full block of the request and its answer has to hold."""
        tokens = (*request.prompt_token_ids, *reference(request))
        contents = contents_of(tokens)
        for group in self.groups.values():
            size = group.block_size
            hashes = block_hashes(tokens, size, request.cache_salt)
            for index, block_hash in enumerate(hashes):
                self.contents[size, block_hash] = contents[index * size : (index + 1) * size]

    def check(self) -> None:
        """All invariants, and the content of every block that can be found."""
        for group in self.groups.values():
            if group.is_dead:
                continue
            group.engine.check_integrity()
            for (size, block_hash), expected in self.contents.items():
                if size != group.block_size:
                    continue
                block = group.engine._pool.find(block_hash)
                if block is not None:
                    found = group.memory.read(block)
                    assert found == expected, f"{group.name}: block {block} holds {found}, not {expected}"

    def settle(self) -> None:
        """Lets everything come to its end: messages, bytes, steps, timers."""
        for _ in range(400):
            self.deliver_all()
            self.copy_all()
            busy = [g.step() for g in self.groups.values() if not g.is_dead]
            if not (any(busy) or self.messages or self.copies):
                living = [group for group in self.groups.values() if not group.is_dead]
                if not any(group.engine.has_work() or group.engine.has_timers() for group in living):
                    return
                self.pass_time(1.0)
        raise AssertionError("the groups do not come to rest")

    def assert_rest(self) -> None:
        """After settle(): both pools as before, every answer right."""
        self.check()
        for group in self.groups.values():
            if not group.is_dead:
                group.assert_idle()
                group.check_answers()
