"""Windows in which other systems lost, leaked or mixed up blocks, each as a schedule; and each once more with
one guard taken out, which the same schedule has to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.engine.toy import make_request, numbers
from tests.unit.exchange import broken
from tests.unit.exchange.world import Group, Options, World
from workers.engine.exchange import Offered, OpenLease, Pulled, Redirect, SourceLost
from workers.types import GenerateRequest, RequestId

TRANSFER = "0f" * 16
PROMPT = numbers(23)
OTHER = numbers(23, 5)
SMALL = Options(num_blocks=8)


def _computed(prompt: tuple[int, ...] = PROMPT, name: str = "p") -> GenerateRequest:
    return replace(make_request(name, prompt, 0), transfer_id=TRANSFER)


def _fetching(world: World, source: str = "P", transfer_id: str | None = TRANSFER) -> GenerateRequest:
    return replace(make_request("r", PROMPT, 4), kv_source=world.source(source, transfer_id))


def _in_flight(world: World, options: Options | None = None) -> tuple[Group, Group]:
    """P has computed the prompt, and half a block of it has come to D."""
    prefill, decode = world.start("P", options), world.start("D", options)
    prefill.submit(_computed())
    prefill.run()
    decode.submit(_fetching(world))
    decode.step()
    world.deliver_all()
    assert decode.engine.stats().kv_transferring_blocks == 5
    world.copies[0].advance()
    return prefill, decode


def _rest(world: World) -> None:
    world.settle()
    world.assert_rest()


def abort_before_the_reader_knows(world: World) -> None:
    prefill = world.start("P")
    world.start("D")
    prefill.submit(_computed())
    prefill.run()
    prefill.abort(RequestId("p"))  # and D never hears of it
    world.assert_rest()  # at once


def abort_races_the_end_of_the_transfer(world: World) -> None:
    _, decode = _in_flight(world)
    world.copy_all()  # the message lies there
    decode.abort(RequestId("r"))
    decode.engine.check_integrity()
    assert decode.stats_held == 5  # in flight as far as the engine knows
    world.deliver_all(Pulled)
    assert decode.stats_held == 0
    assert decode.engine.stats().cached_blocks == 5  # they came whole
    _rest(world)


def abort_with_a_read_and_a_transfer_pending(world: World) -> None:
    prefill, decode, third = world.start("P"), world.start("D"), world.start("E")
    decode.submit(make_request("first", PROMPT[:13], 0))
    decode.run()
    prefill.submit(_computed())
    prefill.run()
    decode.submit(_fetching(world))  # holds three blocks, reads two
    third.submit(_fetching(world, "D", None))  # reads the three of D
    for group in (decode, third):
        group.step()
    world.deliver_all()
    assert len(world.copies) == 2
    decode.abort(RequestId("r"))
    decode.engine.check_integrity()
    world.copy_all()
    world.deliver_all()
    world.check()
    _rest(world)
    assert third.engine.stats().kv_fetched_tokens_total == 12


def completion_after_its_blocks_were_wanted_back(world: World) -> None:
    options = replace(SMALL, num_blocks=10)
    prefill, decode = world.start("P", options), world.start("D", options)
    prefill.submit(_computed())
    prefill.run()
    decode.submit(make_request("big", OTHER[:4], 28))
    decode.step()
    decode.submit(_fetching(world))
    decode.step()
    world.deliver_all()
    decode.run()  # as far as it can: big has what is not in flight, and would have more
    stats = decode.engine.stats()
    assert (stats.kv_fetches_no_memory_total, stats.kv_transferring_blocks) == (1, 5)
    assert (stats.num_running, stats.active_blocks) == (0, 5)
    world.copy_all()
    world.check()
    world.messages.append(world.messages[-1])  # its end is told twice, moreover
    _rest(world)
    assert decode.engine.stats().preemptions_total == 1


def leases_end_while_nothing_is_computed(world: World) -> None:
    prefill, _ = _in_flight(world)
    world.kill("D", is_noticed=False)
    assert prefill.stats_held == 5
    world.pass_time(11.0)  # 10 s after the last renewal, with the next look at the clock
    assert prefill.stats_held == 0
    _rest(world)
    assert prefill.engine.stats().kv_leases_expired_total == 1


def a_lease_ends_behind_one_that_lives(world: World) -> None:
    prefill = world.start("P")
    living, dead = world.start("D"), world.start("E")
    prefill.submit(_computed())
    prefill.submit(replace(_computed(OTHER, "q"), transfer_id=None))
    prefill.run()
    living.submit(_fetching(world))
    living.step()
    dead.submit(replace(make_request("s", OTHER, 4), kv_source=world.source("P")))
    dead.step()
    world.deliver_all(OpenLease)
    world.kill("E", is_noticed=False)
    assert prefill.stats_held == 10
    for _ in range(3):  # living is slow, and renews its lease
        world.pass_time(4.0)
        world.deliver_all(Offered)
        world.copies[0].advance()
    assert prefill.stats_held == 5
    _rest(world)


def a_request_is_refused_before_its_admission(world: World) -> None:
    prefill, decode = world.start("P", SMALL), world.start("D")
    prompt = numbers(33)  # eight blocks and a token: too long for P
    assert not prefill.submit(_computed(prompt))
    reader = replace(make_request("r", prompt, 4), kv_source=world.source("P", TRANSFER))
    assert decode.submit(reader)
    decode.step()
    world.deliver_all()
    decode.run()
    assert ("r", 0) in decode.transcript.last  # without waiting for anything
    assert not prefill.submit(replace(reader, request_id=RequestId("s")))  # nor as a reader
    assert len(prefill.exchange.fetches) == 0
    assert world.now_s == 0
    _rest(world)


def blocks_given_to_another_under_a_late_write(world: World) -> None:
    _, decode = _in_flight(world, SMALL)
    decode.abort(RequestId("r"))
    decode.submit(make_request("other", OTHER, 4))  # needs all but two blocks
    for _ in range(3):
        decode.step()
    world.copy_all()  # the late write
    world.check()
    _rest(world)


def blocks_of_the_source_written_under_a_late_read(world: World) -> None:
    prefill, decode = _in_flight(world, SMALL)
    world.cut_off.add("D")
    world.pass_time(11.0)
    assert (prefill.stats_held, decode.stats_held) == (0, 5)
    prefill.submit(make_request("other", OTHER, 4))
    prefill.run()
    world.copy_all()  # the late read
    world.deliver_all(Pulled)
    world.check()
    _rest(world)
    stats = decode.engine.stats()
    assert (stats.kv_fetches_stalled_total, stats.kv_fetched_tokens_total) == (1, 0)


def the_queue_of_the_source_is_long(world: World) -> None:
    prefill, decode = world.start("P", Options(max_running=1)), world.start("D")
    prefill.submit(make_request("first", OTHER, 30))
    prefill.step()  # and then it is in a step that does not end
    prefill.submit(_computed())
    decode.submit(_fetching(world))
    decode.step()
    world.deliver_all(OpenLease)
    for _ in range(30):
        world.pass_time(1.0)
        world.deliver_all()
        assert not decode.step()  # it waits
    prefill.run()
    _rest(world)
    stats = decode.engine.stats()
    assert (stats.kv_fetches_stalled_total, stats.kv_fetched_tokens_total) == (0, 20)


def two_groups_are_to_compute_for_each_other_what_they_read(world: World) -> None:
    pair = (world.start("P"), world.start("D"))
    for group, other, transfer_id in ((*pair, "a" * 32), (*pair[::-1], "b" * 32)):
        group.submit(_fetching(world, other.name, transfer_id))
        group.step()
        other.submit(replace(_computed(), transfer_id=transfer_id))
    _rest(world)
    assert world.now_s < 3  # nobody had to be given up
    assert sum(group.engine.stats().kv_fetches_stalled_total for group in pair) == 0


def the_source_dies_before_it_says_that_it_is_done(world: World) -> None:
    prefill, decode = world.start("P", Options(max_step_tokens=8)), world.start("D")
    decode.submit(_fetching(world))
    decode.step()
    prefill.submit(_computed())
    world.deliver_all()
    prefill.step()
    world.deliver_all()
    world.copy_all()
    world.kill("P", is_noticed=False)  # two of five blocks have come
    world.deliver_all()
    _rest(world)
    stats = decode.engine.stats()
    assert (stats.kv_fetches_stalled_total, stats.kv_fetched_tokens_total) == (1, 8)
    assert 10 < world.now_s < 12


def a_retry_comes_while_the_first_attempt_runs(world: World) -> None:
    prefill, decode = world.start("P", Options(max_step_tokens=8)), world.start("D")
    decode.submit(_fetching(world))
    decode.step()
    prefill.submit(_computed())
    prefill.submit(_computed(name="again"))
    world.deliver_all()
    prefill.step()
    prefill.abort(RequestId("p"))
    prefill.run()
    _rest(world)
    assert decode.memory.num_computed_tokens == 3 + 3  # the tail, and three of four answers


def a_group_takes_the_place_of_its_source(world: World) -> None:
    _, decode = _in_flight(world, SMALL)
    world.reads_by_name = True
    world.kill("P", is_noticed=False)
    successor = world.start("P", SMALL, keeps_memory=True)
    successor.submit(make_request("other", OTHER, 0))
    successor.run()
    world.copy_all()  # by the offers of the one before
    world.deliver_all(Pulled)
    world.check()
    _rest(world)
    assert decode.engine.stats().kv_fetches_void_total == 1


def both_sides_die(world: World) -> None:
    _in_flight(world)
    world.kill("P")
    world.kill("D", is_noticed=False)
    successor = world.start("D")
    successor.submit(_fetching(world))  # the router sends it again, with the source it knew
    _rest(world)
    assert successor.engine.stats().kv_fetches_lost_total == 1


def the_second_source_dies_too(world: World) -> None:
    _, decode = _in_flight(world)
    second = world.start("Q")
    second.submit(_computed())
    second.run()
    world.kill("P")
    world.send(decode, Redirect(RequestId("r"), world.source("Q")))
    world.deliver_all(Redirect)
    world.deliver_all(SourceLost)  # of P, which nobody reads from now
    decode.step()
    assert decode.engine.stats().kv_fetches_total == 2
    world.deliver_all(OpenLease)
    world.deliver_all(Offered)
    world.copies[-1].advance()
    world.kill("Q")
    world.deliver_all()
    assert decode.step()  # computes
    world.check()
    _rest(world)


def values_are_found_bad_after_they_were_offered(world: World) -> None:
    prefill, decode = _in_flight(world)
    other = make_request("bad", PROMPT, 4)
    prefill.submit(other)
    prefill.spoiled.add(other.request_id)
    for block in range(5):
        prefill.memory.write(block, 0, [666] * 4)
    prefill.memory.spoil = lambda piece: "not a number"
    prefill.run()
    prefill.memory.spoil = lambda piece: None
    world.copy_all()
    world.deliver_all()
    world.check()
    assert decode.engine.stats().kv_fetches_void_total == 1
    prefill.submit(make_request("next", OTHER, 2))
    _rest(world)
    assert set().union(*(plan.zero_blocks for plan in prefill.memory.plans)) >= set(range(5))


Race = Callable[[World], None]

# Each race, and a guard without which it goes wrong.
RACES: list[tuple[Race, Callable[[], World]]] = [
    (abort_before_the_reader_knows, lambda: World(prepare=broken.leases(broken.PinsByItself))),
    (abort_races_the_end_of_the_transfer, lambda: World(prepare=broken.fetches(broken.IgnoresLatePulls))),
    (abort_races_the_end_of_the_transfer, lambda: World(prepare=broken.fetches(broken.FreesInFlight))),
    (
        abort_with_a_read_and_a_transfer_pending,
        lambda: World(prepare=broken.fetches(broken.FreesForEverybody)),
    ),
    (
        completion_after_its_blocks_were_wanted_back,
        lambda: World(prepare=broken.fetches(broken.FreesInFlight)),
    ),
    (
        completion_after_its_blocks_were_wanted_back,
        lambda: World(prepare=broken.fetches(broken.TrustsLatePulls)),
    ),
    (leases_end_while_nothing_is_computed, lambda: World(prepare=broken.exchange(broken.NeverSweeps))),
    (a_lease_ends_behind_one_that_lives, lambda: World(prepare=broken.leases(broken.StopsAtTheFirst))),
    (a_request_is_refused_before_its_admission, lambda: World(prepare=broken.leases(broken.ForgetsRefusals))),
    (blocks_given_to_another_under_a_late_write, lambda: World(prepare=broken.fetches(broken.FreesInFlight))),
    (blocks_of_the_source_written_under_a_late_read, lambda: World(checks_generations=False)),
    (
        two_groups_are_to_compute_for_each_other_what_they_read,
        lambda: World(prepare=broken.prefixes(broken.WaitsForAllFetches)),
    ),
    (the_queue_of_the_source_is_long, lambda: World(says_it_lives=False)),
    (
        the_source_dies_before_it_says_that_it_is_done,
        lambda: World(prepare=broken.fetches(broken.DeafToLoss)),
    ),
    (
        a_retry_comes_while_the_first_attempt_runs,
        lambda: World(prepare=broken.leases(broken.EndsWithTheFirst)),
    ),
    (a_group_takes_the_place_of_its_source, lambda: World(generations_apart=0)),
    (both_sides_die, lambda: World(prepare=broken.fetches(broken.DeafToLoss))),
    (the_second_source_dies_too, lambda: World(prepare=broken.fetches(broken.DeafToLoss))),
    (values_are_found_bad_after_they_were_offered, lambda: World(checks_generations=False)),
]


@pytest.mark.parametrize("race", dict.fromkeys(race for race, _ in RACES), ids=lambda race: race.__name__)
def test_race(race: Race) -> None:
    race(World())


@pytest.mark.parametrize(("race", "make_broken"), RACES, ids=[race.__name__ for race, _ in RACES])
def test_race_is_lost_without_its_guard(race: Race, make_broken: Callable[[], World]) -> None:
    with pytest.raises(AssertionError):
        race(make_broken())
