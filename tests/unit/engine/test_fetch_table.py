"""Fetches of one engine, whose other side the test plays: exact orders, holds and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.toy import ToyExecutor, Transcript, make_engine, make_request, numbers, reference, run
from workers.config import TransferConfig
from workers.engine.engine import Engine
from workers.engine.exchange import ExchangeCommand, Offered, OpenLease, Pulled, Redirect, SourceLost
from workers.engine.leases import LeaseId
from workers.hashing import BlockHash, block_hashes
from workers.types import BlockOffer, BlockRead, GenerateRequest, GroupId, KVSource, RequestId, SourceReads

PROMPT = numbers(23)  # five full blocks of four, and three tokens
HASHES = tuple(block_hashes(PROMPT, 4))
SOURCE = KVSource(group_id=GroupId("P"), host="10.0.0.1", port=1)


class Peers:
    """Notes what is asked of other groups."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, str, tuple[BlockHash, ...]]] = []
        self.pulled: list[tuple[int, int, list[tuple[int, int, int]]]] = []
        self.closed: list[int] = []

    def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
        self.opened.append((fetch_id, source.group_id, tuple(hashes)))

    def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
        self.pulled.append((fetch_id, pull_id, [tuple(block) for block in blocks]))

    def close(self, fetch_id: int) -> None:
        self.closed.append(fetch_id)


def _engine(num_blocks: int = 32, **options: Any) -> tuple[Engine, ToyExecutor, Peers]:
    peers = Peers()
    engine, executor = make_engine(
        num_blocks=num_blocks, block_size=4, expected_output_tokens=1, peers=peers, **options
    )
    return engine, executor, peers


def _request(name: str = "r", prompt: tuple[int, ...] = PROMPT, tokens: int = 4) -> GenerateRequest:
    return replace(make_request(name, prompt, tokens), kv_source=SOURCE)


def _offers(*blocks: int, first: int = 0) -> tuple[BlockOffer, ...]:
    return tuple(
        BlockOffer(index=index, block=block, generation=7) for index, block in enumerate(blocks, first)
    )


def _tell(engine: Engine, *commands: ExchangeCommand) -> None:
    for command in commands:
        engine.handle(command)
        engine.check_integrity()


def _write(executor: ToyExecutor, peers: Peers, first: int = 0) -> None:
    """What the ordered pulls bring, for one fetch of the prompt's blocks from the first one on."""
    other, source = make_engine(block_size=4)
    other.add(make_request("p", PROMPT, 0))
    run(other)
    size, place = 4, 4 * first
    for _, _, blocks in peers.pulled:
        for _, _, own in blocks:
            executor._pool[own * size : (own + 1) * size] = source._pool[place : place + size]
            place += size


def test_what_is_missing_is_asked_for_read_and_held_until_admission() -> None:
    engine, executor, peers = _engine()
    engine.add(make_request("before", PROMPT[:9], 0))
    run(engine)  # blocks 0 and 1 are cached
    engine.add(_request())
    assert engine.step() == []
    assert (engine.has_work(), engine.can_step()) == (True, False)
    assert peers.opened == [(1, "P", HASHES[2:])]
    assert engine.stats().active_blocks == 2  # held, so that they stay
    assert engine.stats().waiting_tokens == 23 - 12  # the rest is on its way
    _tell(engine, Offered(1, _offers(40, 41), False))
    own = [block for _, _, block in peers.pulled[0][2]]
    assert peers.pulled == [(1, 1, [(40, 7, own[0]), (41, 7, own[1])])]
    assert engine.stats().kv_transferring_blocks == 2
    _tell(engine, Pulled(1), Offered(1, _offers(42, first=2), False))
    assert [event.block_hashes for event in engine.take_events()][-1][-2:] == HASHES[2:4]  # findable at once
    assert (engine.can_step(), engine.step(), peers.closed) == (True, [], [])
    _write(executor, peers, first=2)
    _tell(engine, Pulled(2))
    assert peers.closed == [1]
    assert engine.stats().active_blocks == 5
    assert len(engine.step()) == 1
    assert executor.plans[-1].slices[0].start == 20
    assert engine.stats().active_blocks == 6
    stats = engine.stats()
    assert (stats.kv_fetches_total, stats.kv_fetched_tokens_total) == (1, 12)
    assert (stats.kv_transferring_blocks, stats.kv_fetches_incomplete_total) == (0, 0)


def test_a_block_aligned_prompt_leaves_its_last_block_to_compute() -> None:
    engine, _, peers = _engine()
    engine.add(_request(prompt=PROMPT[:8]))
    engine.step()
    assert peers.opened == [(1, "P", HASHES[:1])]


@pytest.mark.parametrize("changes", [{"kv_source": None}, {"prompt_token_ids": PROMPT[:4]}])
def test_nothing_to_read_opens_nothing(changes: dict[str, Any]) -> None:
    engine, _, peers = _engine()
    engine.add(replace(_request(), **changes))
    run(engine)
    assert (peers.opened, engine.stats().kv_fetches_total) == ([], 0)


def test_prompt_scores_are_computed_not_read() -> None:
    engine, _, peers = _engine()
    engine.add(replace(make_request("r", PROMPT, 4, num_prompt_logprobs=1), kv_source=SOURCE))
    run(engine)
    assert peers.opened == []


def test_without_peers_or_prefix_reuse_sources_are_ignored() -> None:
    for options in ({"peers": None}, {"peers": Peers(), "prefix_reuse": False}):
        engine, _ = make_engine(block_size=4, **options)  # type: ignore[arg-type]  # of two kinds
        engine.add(_request())
        assert run(engine).tokens["r", 0] == reference(_request())


@pytest.mark.parametrize(
    ("command", "counter"),
    [
        (SourceLost(1, "gone"), "kv_fetches_lost_total"),
        (Offered(1, (), True), "kv_fetches_incomplete_total"),
        (Pulled(1, "checksum"), "kv_fetches_void_total"),
        (Offered(1, _offers(9, first=3), False), "kv_fetches_void_total"),  # out of turn
        (Offered(1, _offers(9, 9, 9, 9, first=2), False), "kv_fetches_void_total"),  # more than asked for
        (Offered(1, _offers(-1, first=2), False), "kv_fetches_void_total"),
        (
            Offered(1, (BlockOffer(index=2, block=0, generation=-1),), False),
            "kv_fetches_void_total",
        ),
    ],
)
def test_whatever_fails_is_computed_here(command: ExchangeCommand, counter: str) -> None:
    engine, executor, peers = _engine()
    engine.add(_request())
    engine.step()
    _tell(engine, Offered(1, _offers(40, 41), False))
    _write(executor, peers)
    is_pull = isinstance(command, Pulled)
    _tell(engine, command, *(() if is_pull else (Pulled(1),)))
    transcript = run(engine)
    assert transcript.tokens["r", 0] == reference(_request())
    assert transcript.cached("r") == (0 if is_pull else 8)
    assert getattr(engine.stats(), counter) == 1
    assert peers.closed == [1]
    assert engine.stats().active_blocks == 0


def test_blocks_of_a_failed_pull_are_zeroed_before_anything_is_computed() -> None:
    engine, executor, peers = _engine()
    engine.add(_request())
    engine.step()
    _tell(engine, Offered(1, _offers(40, 41), False), Pulled(1, "checksum"))
    run(engine)
    assert set(executor.plans[0].zero_blocks) == {block for _, _, block in peers.pulled[0][2]}


def test_blocks_to_be_zeroed_may_be_read_into_before_that() -> None:
    engine, executor, peers = _engine(num_blocks=8)
    engine.add(_request())
    engine.step()
    _tell(engine, Offered(1, _offers(1, 2, 3, 4, 5), False), Pulled(1, "checksum"))
    engine.abort(RequestId("r"))
    engine.add(_request("again"))
    engine.step()
    _tell(engine, Offered(2, _offers(1, 2, 3, 4, 5), True))
    peers.pulled.pop(0)
    _write(executor, peers)
    _tell(engine, Pulled(2))
    transcript = run(engine)
    assert transcript.cached("again") == 20
    assert transcript.tokens["again", 0] == reference(_request())
    own = {block for _, _, block in peers.pulled[0][2]}
    assert not own & set().union(*(plan.zero_blocks for plan in executor.plans))


def test_without_progress_a_fetch_is_given_up() -> None:
    now = [0.0]
    engine, _, peers = _engine(clock=lambda: now[0])
    engine.add(_request())
    engine.step()
    for now[0] in (9.0, 10.0):
        assert not engine.sweep()
    _tell(engine, Offered(1, _offers(40), False))
    now[0] = 19.5
    assert not engine.sweep()
    now[0] = 20.5
    assert engine.sweep()
    assert (peers.closed, engine.stats().kv_fetches_stalled_total) == ([1], 1)
    assert engine.can_step()
    transcript = Transcript()
    transcript.take(engine.step())
    assert engine.stats().kv_transferring_blocks == 1  # until its end is told
    _tell(engine, Pulled(1, "timed out"))
    assert run(engine, transcript).tokens["r", 0] == reference(_request())


def test_a_source_that_says_that_it_works_on_it_is_waited_for() -> None:
    now = [0.0]
    engine, _, _ = _engine(clock=lambda: now[0], transfer=TransferConfig(stall_s=4.0))
    engine.add(_request())
    engine.step()
    for now[0] in (3.0, 6.0, 9.0, 12.0):
        _tell(engine, Offered(1, (), False))
        assert not engine.sweep()
    now[0] = 16.5
    assert engine.sweep() and engine.stats().kv_fetches_stalled_total == 1


def test_a_source_that_has_said_its_last_word_does_not_take_it_back() -> None:
    engine, _, peers = _engine()
    engine.add(_request())
    engine.step()
    _tell(engine, Offered(1, _offers(40), True), Offered(1, (), False), Pulled(1))
    assert (peers.closed, engine.stats().kv_fetches_incomplete_total) == ([1], 1)


def test_what_was_read_from_each_source_is_told() -> None:
    engine, _, _ = _engine(num_blocks=200)
    assert engine.stats().kv_sources == ()
    engine.add(_request())
    engine.step()
    reads = SourceReads(group_id=GroupId("P"), num_open=1)
    assert engine.stats().kv_sources == (reads,)
    _tell(engine, Offered(1, _offers(40, 41), False))
    _tell(engine, Pulled(1, None, "memory", 0.25))
    told = engine.stats().kv_sources
    assert told == (replace(reads, transport="memory", num_blocks=2, seconds=0.25),)
    assert engine.stats().kv_sources is told  # nothing has changed
    _tell(engine, Offered(1, (), True))  # it has fewer than were asked for
    assert engine.stats().kv_sources == (replace(told[0], num_open=0, num_failed=1),)
    other = KVSource(group_id=GroupId("Q"), host="10.0.0.2", port=1)
    engine.add(replace(_request("s", prompt=numbers(23, 9)), kv_source=other))
    engine.step()
    engine.abort(RequestId("s"))
    assert [reads.num_open for reads in engine.stats().kv_sources] == [0, 0]
    assert engine.stats().kv_sources[1] == SourceReads(group_id=GroupId("Q"))  # through no fault of its


def test_large_offers_are_pulled_in_portions() -> None:
    engine, _, peers = _engine(num_blocks=200)
    engine.add(_request(prompt=numbers(601)))
    engine.step()
    _tell(engine, Offered(1, _offers(*range(150)), True))
    assert [(pull_id, len(blocks)) for _, pull_id, blocks in peers.pulled] == [(1, 64), (2, 64), (3, 22)]
    _tell(engine, Pulled(3), Pulled(1))
    assert (engine.stats().kv_fetched_tokens_total, peers.closed) == (344, [])
    _tell(engine, Pulled(2))
    assert peers.closed == [1]


def test_a_second_request_waits_for_what_the_first_reads_and_reads_the_rest() -> None:
    engine, executor, peers = _engine()
    longer = (*PROMPT, *numbers(8, 3))
    engine.add(_request("a"))
    engine.add(_request("b", longer))
    engine.add(make_request("c", PROMPT, 2))  # without a source: waits too
    engine.step()
    assert [opened[0] for opened in peers.opened] == [1]
    assert engine.stats().num_waiting == 3
    _tell(engine, Offered(1, _offers(1, 2, 3, 4, 5), True))
    _write(executor, peers)
    _tell(engine, Pulled(1))
    transcript = Transcript()
    transcript.take(engine.step())
    assert peers.opened[1] == (2, "P", tuple(block_hashes(longer, 4))[5:7])
    assert engine.stats().num_running == 2
    _tell(engine, SourceLost(2, "gone"))
    run(engine, transcript)
    assert [transcript.cached(name) for name in "abc"] == [20, 20, 20]
    assert transcript.tokens["b", 0] == reference(_request("b", longer))


def test_others_overtake_a_request_that_waits_for_its_blocks() -> None:
    engine, _, _ = _engine()
    engine.add(_request())
    engine.add(make_request("other", numbers(9, 4), 2))
    transcript = Transcript()
    for _ in range(3):
        transcript.take(engine.step())
    assert ("other", 0) in transcript.last
    assert not engine.can_step()


def test_all_choices_wait_for_one_fetch() -> None:
    engine, executor, peers = _engine()
    request = replace(make_request("r", PROMPT, 4, num_choices=3, temperature=1.0), kv_source=SOURCE)
    engine.add(request)
    engine.step()
    _tell(engine, Offered(1, _offers(1, 2, 3, 4, 5), True))
    _write(executor, peers)
    _tell(engine, Pulled(1))
    transcript = run(engine)
    assert len(peers.opened) == 1
    assert executor.num_computed_tokens == 3 * (3 + 3)
    for choice in range(3):
        assert transcript.tokens["r", choice] == reference(request, choice)


def test_a_fetch_starts_only_when_its_request_would_be_admitted() -> None:
    engine, _, peers = _engine(num_blocks=10)
    engine.add(make_request("big", numbers(17, 4), 8))  # expected: six blocks
    engine.step()
    engine.add(_request())  # expected: seven
    engine.step()
    assert peers.opened == []
    engine.abort(RequestId("big"))
    engine.step()
    assert len(peers.opened) == 1


def test_a_fetch_is_given_up_before_anybody_is_preempted() -> None:
    engine, _, peers = _engine(num_blocks=10)
    engine.add(make_request("big", numbers(4, 4), 30))
    transcript = Transcript()
    transcript.take(engine.step())
    engine.add(_request())
    transcript.take(engine.step())
    _tell(engine, Offered(1, _offers(1, 2), False), Pulled(1))
    while not engine.stats().kv_fetches_no_memory_total:
        transcript.take(engine.step())
    assert engine.stats().preemptions_total == 0
    assert peers.closed == [1]
    run(engine, transcript)
    assert transcript.tokens["big", 0] == reference(make_request("big", numbers(4, 4), 30))


def test_redirected_a_request_reads_elsewhere_or_computes() -> None:
    engine, _, peers = _engine()
    engine.add(_request())
    engine.step()
    _tell(engine, Redirect(RequestId("r"), replace(SOURCE, group_id=GroupId("Q"))))
    assert peers.closed == [1]
    engine.step()
    assert peers.opened[1] == (2, "Q", HASHES)
    _tell(engine, Offered(1, _offers(1), True), SourceLost(1, "gone"))  # of the first: nobody listens
    assert not engine.step()
    _tell(engine, Redirect(RequestId("r"), replace(SOURCE, port=0)))  # none at all: computes
    _tell(engine, Redirect(RequestId("unknown"), None))
    transcript = Transcript()
    transcript.take(engine.step())
    _tell(engine, Redirect(RequestId("r"), SOURCE))  # too late
    assert run(engine, transcript).tokens["r", 0] == reference(_request())
    assert (len(peers.opened), peers.closed) == (2, [1, 2])


def test_a_failed_engine_closes_its_fetches_and_leases() -> None:
    engine, _, peers = _engine()
    engine.add(make_request("before", numbers(9, 4), 0))
    run(engine)
    engine.handle(OpenLease(LeaseId("E/1"), tuple(block_hashes(numbers(9, 4), 4)), None))
    engine.add(_request())
    engine.step()
    engine.fail_all()
    assert peers.closed == [1]
    stats = engine.stats()
    assert (stats.kv_leases, stats.active_blocks) == (0, 0)
    engine.check_integrity()


def test_an_idle_group_waits_a_while_for_leased_blocks_and_then_takes_them() -> None:
    now = [0.0]
    engine, _ = make_engine(num_blocks=8, block_size=4, clock=lambda: now[0])
    engine.add(make_request("before", PROMPT, 0))
    run(engine)
    engine.handle(OpenLease(LeaseId("E/1"), HASHES, None))
    engine.add(make_request("next", numbers(23, 4), 4))
    for now[0] in (1.0, 2.0):
        assert engine.step() == []
        assert not engine.can_step()
        engine.sweep()
        assert engine.can_step()
    now[0] = 3.0
    assert len(engine.step()) == 1
    assert engine.stats().kv_leases == 0
    run(engine)
