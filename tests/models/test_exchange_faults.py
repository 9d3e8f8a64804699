"""A group that dies or stops while another reads its blocks: the same tokens, and nothing is held for it.

The source has half of the prompt and does not get the request that would compute the rest, so that the reader
has half and waits: a group that is hit then is hit in the middle of a transfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.models.checkpoints import prompt_ids
from tests.models.engine_groups import GREEDY
from tests.models.exchange_groups import ForeignMember, LocalMember, Loop, Member, Ranks, through
from workers.config import GroupConfig, TransferConfig
from workers.types import RequestId

PROMPT = prompt_ids(200)
HALF = 96  # tokens in whole blocks
EXPECTED_S = 5.0  # that a source waits for the request that computes the rest
LEASE_S = 10.0  # without a word of the reader
NOTHING = {"active_blocks": 0, "kv_leases": 0, "num_running": 0, "num_waiting": 0}


@pytest.fixture
def foreign(
    loop: Loop, ranks: Ranks, long_config: Callable[[str, int], GroupConfig]
) -> Iterator[ForeignMember]:
    """A process that is hit."""
    member = ForeignMember(loop, "foreign", long_config("llama", 1), ranks)
    yield member
    member.close()


@pytest.fixture
def local(loop: Loop, long_config: Callable[[str, int], GroupConfig]) -> Iterator[LocalMember]:
    member = LocalMember(loop, "local", long_config("llama", 1))
    yield member
    member.close()


def begin(source: Member, reader: Member) -> RequestId:
    """A request half of whose blocks have been read."""
    source.answer(source.submit(PROMPT[: HALF + 1]))
    request_id = reader.submit(PROMPT, source=source.source("0f" * 16))
    reader.wait_for("half", kv_fetched_tokens_total=HALF)
    source.wait_for("lease", kv_leases=1, active_blocks=HALF // 16)
    return request_id


def alone(member: Member) -> list[int]:
    return member.answer(member.submit(PROMPT, salt="alone")).token_ids


def test_a_source_killed_before_it_has_said_a_word(foreign: ForeignMember, local: LocalMember) -> None:
    expected = alone(local)
    foreign.stop()
    request_id = local.submit(PROMPT, source=foreign.source("0f" * 16))
    local.wait_for("fetch", kv_fetches_total=1)
    foreign.kill()
    answer = local.answer(request_id, timeout_s=3.0)
    assert answer.token_ids == expected and answer.num_cached == 0
    local.wait_for("rest", kv_fetches_lost_total=1, **NOTHING)


def test_a_source_killed_in_the_middle(foreign: ForeignMember, local: LocalMember) -> None:
    expected = alone(local)
    request_id = begin(foreign, local)
    foreign.kill()
    answer = local.answer(request_id, timeout_s=3.0)
    assert answer.token_ids == expected and answer.num_cached == HALF
    local.wait_for("rest", kv_fetches_lost_total=1, **NOTHING)


def test_a_source_killed_when_all_has_been_read(foreign: ForeignMember, local: LocalMember) -> None:
    expected = alone(local)
    foreign.answer(foreign.submit(PROMPT))
    request_id = local.submit(PROMPT, source=foreign.source("0f" * 16))
    local.wait_for("all", kv_fetched_tokens_total=192)
    foreign.kill()
    answer = local.answer(request_id)
    assert answer.token_ids == expected and answer.num_cached == 192
    local.wait_for("rest", kv_fetches_lost_total=0, **NOTHING)


def test_a_reader_killed_in_the_middle(foreign: ForeignMember, local: LocalMember) -> None:
    begin(local, foreign)
    foreign.kill()
    local.wait_for("rest", timeout_s=1.0, kv_leases_expired_total=0, **NOTHING)


@pytest.fixture
def of_two(
    loop: Loop, ranks: Ranks, long_config: Callable[[str, int], GroupConfig]
) -> Iterator[ForeignMember]:
    """Two processes, one of which is hit."""
    member = ForeignMember(loop, "two-ranks", long_config("llama", 2), ranks)
    yield member
    member.close()


def test_a_rank_above_0_of_a_source_killed_in_the_middle(of_two: ForeignMember, local: LocalMember) -> None:
    expected = alone(local)
    request_id = begin(of_two, local)
    of_two.kill(rank=1)
    answer = local.answer(request_id, timeout_s=3.0)
    assert answer.token_ids == expected and answer.num_cached == HALF
    local.wait_for("rest", kv_fetches_lost_total=1, **NOTHING)


def test_a_rank_above_0_of_a_reader_killed_in_the_middle(of_two: ForeignMember, local: LocalMember) -> None:
    expected = alone(local)
    begin(local, of_two)
    of_two.kill(rank=1)
    local.wait_for("rest", timeout_s=1.0, kv_leases_expired_total=0, **NOTHING)
    again = local.answer(local.submit(PROMPT))
    assert again.token_ids == expected and again.num_cached == HALF  # what it had lent is whole


@pytest.mark.faults
def test_a_source_that_never_gets_the_request(foreign: ForeignMember, local: LocalMember) -> None:
    request_id = begin(foreign, local)
    began_s = time.monotonic()
    answer = local.answer(request_id, timeout_s=EXPECTED_S + 1.5)
    assert time.monotonic() - began_s > EXPECTED_S - 2.0
    assert answer.token_ids == alone(local) and answer.num_cached == HALF
    foreign.wait_for("rest", **NOTHING)
    local.wait_for("rest", kv_fetches_incomplete_total=1, **NOTHING)


@pytest.mark.faults
def test_a_source_that_is_stopped(foreign: ForeignMember, local: LocalMember) -> None:
    """Its memory could still be read; what it has not computed does not come."""
    expected = alone(local)
    request_id = begin(foreign, local)
    foreign.stop()
    answer = local.answer(request_id, timeout_s=5.0)  # silent for 4 s, looked at every half second
    assert answer.token_ids == expected and answer.num_cached == HALF
    assert local.stats.kv_fetches_lost_total == 1
    foreign.go_on()
    foreign.wait_for("rest", timeout_s=2.0, **NOTHING)
    again = foreign.answer(foreign.submit(PROMPT))
    assert again.token_ids == expected


@pytest.mark.faults
def test_a_source_that_computes_something_else_for_long_is_waited_for(
    loop: Loop, ranks: Ranks, long_config: Callable[[str, int], GroupConfig], local: LocalMember
) -> None:
    """Its queue, that is, is longer than a reader waits for one that says nothing."""
    config = long_config("llama", 1)
    one_by_one = replace(config, schedule=replace(config.schedule, max_running=1))
    patient = replace(config, transfer=TransferConfig(stall_s=3.0, heartbeat_s=1.0))
    source = ForeignMember(loop, "busy", one_by_one, ranks)
    reader = ForeignMember(loop, "patient", patient, ranks)
    try:
        expected = alone(local)
        endless = replace(GREEDY, max_tokens=2000, ignore_eos=True)
        busy = [source.submit([7], endless, salt=f"{i}") for i in range(12)]
        began_s = time.monotonic()
        request_id = through(source, reader, PROMPT)
        time.sleep(7.0)
        assert source.answers[busy[-1], 0].finish is None, "the source was not busy for long enough"
        for request in busy:
            source.abort(request)
        answer = reader.answer(request_id)
        assert time.monotonic() - began_s > 2 * 3.0
        assert answer.token_ids == expected and answer.num_cached == 192
        assert reader.wait_for("all", kv_fetched_tokens_total=192).kv_fetches_stalled_total == 0
    finally:
        source.close()
        reader.close()


@pytest.mark.faults
def test_a_reader_that_is_stopped(foreign: ForeignMember, local: LocalMember) -> None:
    """Its lease ends; when it goes on it has the same answer."""
    expected = alone(local)
    request_id = begin(local, foreign)
    foreign.stop()
    local.wait_for("rest", timeout_s=LEASE_S + 1.5, **NOTHING)
    foreign.go_on()
    answer = foreign.answer(request_id)
    assert answer.token_ids == expected and answer.num_cached == HALF
    foreign.wait_for("rest", **NOTHING)
