"""Everything that can happen to groups that read from each other, as actions that a schedule chooses."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.unit.engine.toy import make_request, numbers
from tests.unit.exchange.world import Group, Options, World
from workers.engine.exchange import Pulled, Redirect
from workers.types import RequestId


class Chaos:
    """Three groups; any of them may read from any other. Each action takes numbers and is always allowed."""

    NAMES = ("A", "B", "C")

    def __init__(self, world: World, options: Options) -> None:
        self.world = world
        self.options = options
        self.num_requests = 0
        self.gone: list[Group] = []
        for name in self.NAMES:
            world.start(name, options)

    def group(self, pick: int) -> Group:
        return self.world.groups[self.NAMES[pick % 3]]

    # -- requests

    def submit(self, to: int, source: int, length: int, family: int, shape: int) -> None:
        """A request for one group that reads from another, which may be told to compute it, before or after.

        shape: bits of what else there is to it.
        """
        reader, other = self.group(to), self.group(to + 1 + source % 2)
        transfer_id = f"{self.num_requests:032x}" if shape & 1 else None
        prompt = numbers(length, family)
        request = replace(
            make_request(
                f"r{self.num_requests}",
                prompt,
                1 + (shape >> 1) % 7,
                num_choices=2 if shape & 16 else 1,
                priority=1 if shape & 32 else 0,
                num_prompt_logprobs=0 if shape & 448 == 448 else None,
                temperature=1.0,
            ),
            kv_source=self.world.source(other.name, transfer_id),
        )
        computing = replace(make_request(f"p{self.num_requests}", prompt, 0), transfer_id=transfer_id)
        self.num_requests += 1
        if transfer_id is not None and shape & 512:
            other.submit(computing)
        reader.submit(request)
        if transfer_id is not None and shape & 512 == 0 and shape & 1024:
            other.submit(computing)  # else it never comes

    def abort(self, pick: int, at: int) -> None:
        group = self.group(at)
        if group.requests:
            group.abort(list(group.requests)[pick % len(group.requests)])

    def redirect(self, pick: int, at: int, source: int) -> None:
        group = self.group(at)
        if group.requests:
            request_id: RequestId = list(group.requests)[pick % len(group.requests)]
            other = self.group(at + 1 + source % 2)
            command = Redirect(request_id, None if source % 3 == 0 else self.world.source(other.name))
            self.world.send(group, command)

    # -- progress

    def step(self, at: int, count: int) -> None:
        for _ in range(count):
            self.group(at).step()

    def deliver(self, pick: int, count: int) -> None:
        """Some messages, the first of them from any place in the line."""
        for turn in range(count):
            if self.world.messages:
                self.world.deliver(pick % len(self.world.messages) if turn == 0 else 0)

    def repeat(self, pick: int) -> None:
        """A message comes twice."""
        if self.world.messages:
            self.world.messages.append(self.world.messages[pick % len(self.world.messages)])

    def lose(self, pick: int) -> None:
        """A message does not come, unless it tells the end of a pull: that is said inside one process."""
        if self.world.messages:
            index = pick % len(self.world.messages)
            if not isinstance(self.world.messages[index].command, Pulled | Redirect):
                self.world.messages.pop(index)

    def copy(self, pick: int, count: int) -> None:
        """Bytes of one pull."""
        if self.world.copies:
            copy = self.world.copies[pick % len(self.world.copies)]
            for _ in range(count):
                if copy in self.world.copies:
                    copy.advance()

    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    # -- faults

    def kill(self, at: int, is_noticed: bool, keeps_memory: bool) -> None:
        """A group dies, and another takes its place."""
        group = self.group(at)
        self.world.kill(group.name, is_noticed=is_noticed)
        self.gone.append(group)
        self.world.start(group.name, self.options, keeps_memory=keeps_memory)

    def spoil(self, at: int) -> None:
        """The next sampled value of a group is not a number."""
        memory = self.group(at).memory

        def hit(piece: object) -> str | None:
            memory.spoil = lambda piece: None
            group = next(group for group in self.world.groups.values() if group.memory is memory)
            group.spoiled.update(group.requests)
            return "not a number"

        memory.spoil = hit

    # -- the end

    def finish(self) -> None:
        self.world.settle()
        self.world.assert_rest()
        for group in self.gone:
            group.aborted.update(group.requests)
            group.check_answers()  # what it said before it died was right


def play(world: World, seed: int, num_actions: int = 80) -> Chaos:
    """One schedule, drawn from its seed."""
    draw = random.Random(seed)
    options = Options(
        num_blocks=draw.choice([7, 8, 10, 12, 20, 40]),
        block_size=draw.choice([1, 2, 4]),
        max_step_tokens=draw.choice([3, 8, 64]),
        max_running=draw.choice([2, 16]),
        expected_output_tokens=draw.choice([1, 8]),
        guesses={2: "medusa", 3: "draft_model"}.get(seed % 4, "none"),
    )
    chaos = Chaos(world, options)
    longest = min(24, options.num_blocks * options.block_size - 8)
    is_violent = draw.random() < 0.5
    is_slow = draw.random() < 0.5  # bytes move seldom, and more is aborted meanwhile
    for _ in range(num_actions):
        what = draw.random()
        pick, at = draw.randrange(1000), draw.randrange(3)
        if what < 0.20 and longest > 0:
            chaos.submit(at, pick, draw.randint(1, longest), draw.randrange(2), draw.randrange(2048))
        elif what < 0.45:
            chaos.step(at, draw.randint(1, 4))
        elif what < 0.65:
            chaos.deliver(pick, draw.randint(1, 4))
        elif what < (0.68 if is_slow else 0.80):
            chaos.copy(pick, draw.randint(1, 2 if is_slow else 6))
        elif what < 0.85:
            chaos.abort(pick, at)
        elif what < 0.88:
            chaos.redirect(pick, at, draw.randrange(6))
        elif what < 0.92:
            chaos.pass_time(draw.choice([0.1, 1.0, 3.0, 6.0, 12.0]))
        elif not is_violent:
            chaos.deliver(0, 1)
        elif what < 0.94:
            chaos.repeat(pick)
        elif what < 0.96:
            chaos.lose(pick)
        elif what < 0.98:
            chaos.kill(at, draw.random() < 0.7, draw.random() < 0.5)
        else:
            chaos.spoil(at)
        world.check()
    chaos.finish()
    return chaos
