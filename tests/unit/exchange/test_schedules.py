"""Hundreds of drawn schedules: every token right, every block given back, whatever was lost, late or dead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.exchange import broken
from tests.unit.exchange.chaos import Chaos, play
from tests.unit.exchange.world import Options, World
from workers.decoding.drafter import MODEL_METHODS


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_schedules(plans_ahead: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        chaos = play(World(plans_ahead=plans_ahead), seed)
        for group in [*chaos.world.groups.values(), *chaos.gone]:
            stats = group.engine.stats()
            seen["tokens"] += stats.kv_fetched_tokens_total
            seen["incomplete"] += stats.kv_fetches_incomplete_total
            seen["lost"] += stats.kv_fetches_lost_total
            seen["stalled"] += stats.kv_fetches_stalled_total
            seen["void"] += stats.kv_fetches_void_total
            seen["no_memory"] += stats.kv_fetches_no_memory_total
            seen["expired"] += stats.kv_leases_expired_total
            seen["preempted"] += stats.preemptions_total
    assert all(seen.values()) and len(seen) == 8, f"what these schedules never came to: {seen}"
    assert seen["tokens"] > 1_000


# Rare are late reads and writes that hurt, one in 15 to 60 schedules: the search starts near one.
@pytest.mark.parametrize(
    ("make_broken", "first_seed"),
    [
        (lambda: World(prepare=broken.fetches(broken.FreesInFlight)), 40),
        (lambda: World(checks_generations=False), 90),
        (lambda: World(prepare=broken.fetches(broken.TrustsLatePulls)), 0),
        (lambda: World(prepare=broken.fetches(broken.FreesForEverybody)), 0),
        (lambda: World(prepare=broken.fetches(broken.IgnoresLatePulls)), 0),
        (lambda: World(prepare=broken.fetches(broken.DeafToLoss)), 20),
        (lambda: World(prepare=broken.exchange(broken.NeverSweeps)), 0),
    ],
    ids=[
        "frees in flight",
        "no generations",
        "trusts late pulls",
        "frees for everybody",
        "ignores late pulls",
        "deaf",
        "never sweeps",
    ],
)
def test_schedules_notice_a_missing_guard(make_broken: Callable[[], World], first_seed: int) -> None:
    with pytest.raises(AssertionError):
        for seed in range(first_seed, first_seed + 20):
            play(make_broken(), seed)


class ExchangeMachine(RuleBasedStateMachine):
    """The same actions, chosen by Hypothesis, which shortens what fails."""

    @initialize(
        num_blocks=st.sampled_from([8, 12, 24]),
        block_size=st.sampled_from([1, 2, 4]),
        max_step_tokens=st.sampled_from([3, 8, 64]),
        max_running=st.sampled_from([2, 16]),
        expected=st.sampled_from([1, 8]),
        guesses=st.sampled_from(["none", *MODEL_METHODS]),
        plans_ahead=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        max_running: int,
        expected: int,
        guesses: str,
        plans_ahead: bool,
    ) -> None:
        options = Options(
            num_blocks=num_blocks,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            expected_output_tokens=expected,
            guesses=guesses,
        )
        self.chaos = Chaos(World(plans_ahead=plans_ahead), options)

    @rule(
        to=st.integers(0, 2),
        source=st.integers(0, 1),
        length=st.integers(1, 24),
        family=st.integers(0, 1),
        shape=st.integers(0, 2047),
    )
    def submit(self, to: int, source: int, length: int, family: int, shape: int) -> None:
        self.chaos.submit(to, source, length, family, shape)

    @rule(at=st.integers(0, 2), count=st.integers(1, 4))
    def step(self, at: int, count: int) -> None:
        self.chaos.step(at, count)

    @rule(pick=st.integers(0, 50), count=st.integers(1, 4))
    def deliver(self, pick: int, count: int) -> None:
        self.chaos.deliver(pick, count)

    @rule(pick=st.integers(0, 50), count=st.integers(1, 8))
    def copy(self, pick: int, count: int) -> None:
        self.chaos.copy(pick, count)

    @rule(pick=st.integers(0, 50))
    def repeat(self, pick: int) -> None:
        self.chaos.repeat(pick)

    @rule(pick=st.integers(0, 50))
    def lose(self, pick: int) -> None:
        self.chaos.lose(pick)

    @rule(pick=st.integers(0, 50), at=st.integers(0, 2))
    def abort(self, pick: int, at: int) -> None:
        self.chaos.abort(pick, at)

    @rule(pick=st.integers(0, 50), at=st.integers(0, 2), source=st.integers(0, 5))
    def redirect(self, pick: int, at: int, source: int) -> None:
        self.chaos.redirect(pick, at, source)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 6.0, 12.0]))
    def pass_time(self, seconds: float) -> None:
        self.chaos.pass_time(seconds)

    @rule(at=st.integers(0, 2), is_noticed=st.booleans(), keeps_memory=st.booleans())
    def kill(self, at: int, is_noticed: bool, keeps_memory: bool) -> None:
        self.chaos.kill(at, is_noticed, keeps_memory)

    @rule(at=st.integers(0, 2))
    def spoil(self, at: int) -> None:
        self.chaos.spoil(at)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.world.check()

    def teardown(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.finish()


TestExchangeMachine = ExchangeMachine.TestCase
TestExchangeMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
