"""Two groups for one request: one computes the prompt, the other reads its blocks and answers as one does."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.models.checkpoints import prompt_ids
from tests.models.engine_groups import BLOCK_SIZE, GREEDY, Answer
from tests.models.exchange_groups import ForeignMember, LocalMember, Loop, Member, Ranks, through
from workers.config import GroupConfig, TransferConfig
from workers.types import GroupId, SamplingParams

LENGTHS = (1, 15, 16, 17, 48, 200)  # tokens of prompts
SEEDED = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "qwen3_moe")


class Pair:
    """A group for prompts, and one that answers."""

    def __init__(self, prefill: Member, decode: Member) -> None:
        self.prefill, self.decode = prefill, decode
        self.num_fetched = decode.stats.kv_fetched_tokens_total  # as it should be

    def check(self, prompt: list[int], sampling: SamplingParams, salt: str, *, num_here: int = 0) -> None:
        """Through both groups as in one; num_here: tokens that the group that answers has already."""
        alone = self.decode.answer(self.decode.submit(prompt, sampling, salt=f"{salt} alone"))
        answer = self.decode.answer(through(self.prefill, self.decode, prompt, sampling, salt=salt))
        assert_same(answer, alone)
        num_whole = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert answer.num_cached == num_whole, self.decode.stats  # why less was read, if it was
        self.num_fetched += num_whole - num_here
        self.rest(kv_fetched_tokens_total=self.num_fetched)

    def rest(self, **totals: int) -> None:
        """Nothing is held, by neither; totals: of the group that answers."""
        nothing = {"active_blocks": 0, "kv_leases": 0, "num_running": 0, "num_waiting": 0}
        self.decode.wait_for("rest", timeout_s=5.0, **nothing, **totals)
        self.prefill.wait_for("rest", timeout_s=5.0, **nothing)


@contextmanager
def local_pair(loop: Loop, prefill: GroupConfig, decode: GroupConfig) -> Iterator[Pair]:
    """Both in this process."""
    members = LocalMember(loop, "prefill", prefill), LocalMember(loop, "decode", decode)
    try:
        yield Pair(*members)
    finally:
        for member in members:
            member.close()


@pytest.fixture
def pair(loop: Loop, long_config: Callable[[str, int], GroupConfig]) -> Iterator[Pair]:
    with local_pair(loop, long_config("llama", 1), long_config("llama", 1)) as pair:
        yield pair


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.finish is expected.finish
    assert [entry.token_id for entry in answer.logprobs] == [entry.token_id for entry in expected.logprobs]
    for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_of_two_groups_is_that_of_one(
    loop: Loop, long_config: Callable[[str, int], GroupConfig], family: str
) -> None:
    with local_pair(loop, long_config(family, 1), long_config(family, 1)) as pair:
        for length in LENGTHS:
            prompt = prompt_ids(length, seed=length)
            pair.check(prompt, GREEDY, f"greedy {length}")
            pair.check(prompt, SEEDED, f"seeded {length}")


@pytest.mark.parametrize("family", ["llama", "llama_head_dim_8_mqa", "mixtral"])
def test_groups_of_several_ranks(
    loop: Loop, ranks: Ranks, long_config: Callable[[str, int], GroupConfig], family: str
) -> None:
    """Two KV heads, of which each rank of two has one, or one that both have."""
    prefill = {
        size: ForeignMember(loop, f"prefill-{size}", long_config(family, size), ranks) for size in (1, 2)
    }
    decode = {
        size: ForeignMember(loop, f"decode-{size}", long_config(family, size), ranks) for size in (1, 2)
    }
    try:
        for there, here in ((1, 2), (2, 1), (2, 2)):
            pair = Pair(prefill[there], decode[here])
            for length in (17, 200):
                prompt = prompt_ids(length, seed=length)
                pair.check(prompt, GREEDY, f"greedy {length} from {there}")
                pair.check(prompt, SEEDED, f"seeded {length} from {there}")
            check_many(pair, f"many from {there}")
    finally:
        for member in (*prefill.values(), *decode.values()):
            member.close()


def test_blocks_that_either_side_has_already(pair: Pair) -> None:
    prompt = prompt_ids(200)
    pair.prefill.answer(pair.prefill.submit(prompt, salt="there"))
    pair.check(prompt, GREEDY, "there")
    pair.decode.answer(pair.decode.submit(prompt[:100], salt="half here"))
    pair.check(prompt, GREEDY, "half here", num_here=96)
    pair.decode.answer(pair.decode.submit(prompt, salt="all here"))
    pair.check(prompt, GREEDY, "all here", num_here=192)


def test_chunks_of_any_size(loop: Loop, long_config: Callable[[str, int], GroupConfig]) -> None:
    prefill, decode = long_config("llama", 1), long_config("llama", 1)
    for there, here in ((7, 5), (16, 64)):
        with local_pair(
            loop,
            replace(prefill, schedule=replace(prefill.schedule, max_prefill_chunk=there)),
            replace(decode, schedule=replace(decode.schedule, max_prefill_chunk=here)),
        ) as pair:
            pair.check(prompt_ids(480), GREEDY, "")


@pytest.mark.parametrize("transport", ["memory", "sockets", "process_group"])
def test_every_transport(loop: Loop, long_config: Callable[[str, int], GroupConfig], transport: str) -> None:
    """Prompts of 512 and 2,048 tokens."""
    config = long_config("llama", 1)
    config = replace(
        config,
        transfer=TransferConfig(transport=transport),
        cache=replace(config.cache, num_blocks=400),
    )
    with local_pair(loop, config, config) as pair:
        for length in (512, 2048):
            pair.check(prompt_ids(length), GREEDY, f"{length}")
        (reads,) = pair.decode.stats.kv_sources
        assert (reads.group_id, reads.transport) == ("prefill", transport)
        assert (reads.num_open, reads.num_done, reads.num_failed) == (0, 2, 0)
        assert reads.num_blocks == 31 + 127 and reads.seconds > 0


def test_a_rank_that_cannot_listen_costs_the_exchange_and_not_the_group(
    loop: Loop,
    long_config: Callable[[str, int], GroupConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def taken(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    config, prompt = long_config("llama", 1), prompt_ids(100)
    problem = "rank 0 gives out no blocks: [Errno 98] Address already in use"
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", taken)
        deaf = LocalMember(loop, "deaf", config)
    whole = LocalMember(loop, "whole", config)
    try:
        assert (deaf.info.exchanges_kv, deaf.info.exchange_problem) == (False, problem)
        assert (whole.info.exchanges_kv, whole.info.exchange_problem) == (True, "")
        assert caplog.text.count(problem) == 1
        expected = whole.answer(whole.submit(prompt, salt="alone")).token_ids
        for reader, source in ((deaf, whole), (whole, deaf)):
            answer = reader.answer(reader.submit(prompt, source=source.source()), timeout_s=3.0)
            assert answer.token_ids == expected and answer.num_cached == 0
        assert deaf.stats.kv_fetches_total == 0
        whole.wait_for("refusal", kv_fetches_lost_total=1)
    finally:
        deaf.close()
        whole.close()


def test_groups_that_exchange_nothing(loop: Loop, long_config: Callable[[str, int], GroupConfig]) -> None:
    config = long_config("llama", 1)
    closed = replace(config, transfer=TransferConfig(enabled=False))
    prompt = prompt_ids(100)
    with local_pair(loop, closed, config) as pair:
        assert (pair.prefill.info.exchanges_kv, pair.decode.info.exchanges_kv) == (False, True)
        expected = pair.decode.answer(pair.decode.submit(prompt, salt="alone")).token_ids
        there, here = pair.prefill.source(), pair.decode.source()
        answer = pair.decode.answer(pair.decode.submit(prompt, source=there))
        assert answer.token_ids == expected and answer.num_cached == 0
        assert pair.prefill.answer(pair.prefill.submit(prompt, source=here)).token_ids == expected
        pair.rest(kv_fetches_lost_total=1)
        pair.prefill.wait_for("no fetch", kv_fetches_total=0, prompt_tokens_total=100)


def check_many(pair: Pair, salt: str) -> None:
    """16 requests at once, whose blocks come while others are answered. No pool holds all of their blocks."""
    prompts = [prompt_ids(20 + 11 * number, seed=number) for number in range(16)]
    alone = [pair.decode.submit(prompt, SEEDED, salt=f"{salt} alone") for prompt in prompts]
    expected = [pair.decode.answer(request_id) for request_id in alone]
    both = [through(pair.prefill, pair.decode, prompt, SEEDED, salt=salt) for prompt in prompts]
    for request_id, answer in zip(both, expected, strict=True):
        assert_same(pair.decode.answer(request_id), answer)
    pair.rest()


def test_many_at_once(pair: Pair) -> None:
    check_many(pair, "")
    pair.decode.wait_for("fetches", kv_fetches_total=16, kv_fetches_void_total=0, kv_fetches_lost_total=0)


def test_several_choices_and_log_probabilities(pair: Pair) -> None:
    sampling = replace(SEEDED, num_logprobs=3, presence_penalty=0.5)
    prompt = prompt_ids(70)
    alone = pair.decode.submit(prompt, sampling, num_choices=2, salt="alone")
    both = through(pair.prefill, pair.decode, prompt, sampling, num_choices=2)
    for choice in range(2):
        assert_same(pair.decode.answer(both, choice), pair.decode.answer(alone, choice))
    pair.rest(kv_fetched_tokens_total=64)
    scored = replace(GREEDY, num_prompt_logprobs=2)
    again = pair.decode.answer(through(pair.prefill, pair.decode, prompt, scored, salt="scored"))
    expected = pair.decode.answer(pair.decode.submit(prompt, scored, salt="scored alone"))
    assert again.prompt_logprobs == expected.prompt_logprobs and again.token_ids == expected.token_ids
    pair.rest(kv_fetched_tokens_total=64)  # its rows must all be computed


def test_a_neighbour_that_computes_nothing(pair: Pair) -> None:
    prompt = prompt_ids(200)
    pair.prefill.answer(pair.prefill.submit(prompt[:100]))
    answer = pair.decode.answer(pair.decode.submit(prompt, source=pair.prefill.source()))
    assert answer.token_ids == pair.decode.answer(pair.decode.submit(prompt, salt="alone")).token_ids
    assert answer.num_cached == 96
    pair.rest(kv_fetches_incomplete_total=1)


def test_a_request_that_is_sent_to_another_source_or_to_none(pair: Pair) -> None:
    """While it waits for blocks of a request that does not come: the new source says at once what it has."""
    prompt = prompt_ids(200)
    expected = pair.decode.answer(pair.decode.submit(prompt, salt="alone")).token_ids
    for number, source in enumerate((None, pair.prefill.source()), 1):
        salt = f"{number}"
        pair.prefill.answer(pair.prefill.submit(prompt[:100], salt=salt))
        request_id = pair.decode.submit(prompt, salt=salt, source=pair.prefill.source("0f" * 16))
        pair.decode.wait_for("half", kv_fetched_tokens_total=number * 96)
        pair.decode.redirect(request_id, source)
        answer = pair.decode.answer(request_id, timeout_s=3.0)
        assert answer.token_ids == expected and answer.num_cached == 96
    pair.rest(kv_fetches_total=3, kv_fetches_incomplete_total=1)


def test_a_source_that_is_not_there_or_is_another(pair: Pair) -> None:
    prompt = prompt_ids(100)
    expected = pair.decode.answer(pair.decode.submit(prompt, salt="alone")).token_ids
    elsewhere = replace(pair.prefill.source(), port=1)
    renamed = replace(pair.prefill.source(), group_id=GroupId("another"))
    for number, source in enumerate((elsewhere, renamed), 1):
        request_id = pair.decode.submit(prompt, salt=f"{number}", source=source)
        assert pair.decode.answer(request_id, timeout_s=5.0).token_ids == expected
        pair.rest(kv_fetches_lost_total=number)


def test_groups_whose_blocks_differ_refuse_at_once_and_say_in_what(
    loop: Loop, long_config: Callable[[str, int], GroupConfig], caplog: pytest.LogCaptureFixture
) -> None:
    with local_pair(loop, long_config("qwen3", 1), long_config("llama", 1)) as pair:
        prompt = prompt_ids(100)
        expected = pair.decode.answer(pair.decode.submit(prompt, salt="alone")).token_ids
        answer = pair.decode.answer(through(pair.prefill, pair.decode, prompt), timeout_s=3.0)
        assert answer.token_ids == expected and answer.num_cached == 0
        pair.rest(kv_fetches_lost_total=1)
        assert "head_dim (here 16, there 24)" in caplog.text


def test_a_group_that_is_drained_waits_for_its_readers(pair: Pair, loop: Loop) -> None:
    prompt = prompt_ids(200)
    assert isinstance(pair.prefill, LocalMember)
    pair.prefill.answer(pair.prefill.submit(prompt[:100]))
    request_id = pair.decode.submit(prompt, source=pair.prefill.source("0f" * 16))
    pair.prefill.wait_for("lease", kv_leases=1)
    assert loop.run(pair.prefill.host.drain(0.2)) == 0 and pair.prefill.host.num_leases == 1
    pair.decode.abort(request_id)
    assert loop.run(pair.prefill.host.drain(5.0)) == 0 and pair.prefill.host.num_leases == 0


def test_a_request_that_is_cancelled_while_its_blocks_come(pair: Pair) -> None:
    """Its prompt is never computed: the source waits for it until the lease is closed."""
    prompt = prompt_ids(200)
    request_id = pair.decode.submit(prompt, source=pair.prefill.source("0f" * 16))
    pair.prefill.wait_for("lease", kv_leases=1)
    pair.decode.abort(request_id)
    pair.rest(cancelled_total=1)
