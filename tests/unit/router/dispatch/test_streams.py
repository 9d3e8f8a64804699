from __future__ import annotations

import asyncio
from dataclasses import replace

from router.dispatch import streams
from router.dispatch.streams import RequestStream, merge
from tests.unit.data_plane.fakes import request, run
from workers.types import BeamParams, FinishReason, RequestId, TokenChunk, TokenLogprob

LENGTH = FinishReason.LENGTH


def chunk(*tokens: int, choice: int = 0, end: FinishReason | None = None, name: str = "r") -> TokenChunk:
    return TokenChunk(request_id=RequestId(name), choice=choice, token_ids=tokens, finish_reason=end)


def test_chunks_come_out_as_they_went_in() -> None:
    async def test() -> None:
        stream = RequestStream(request("r", max_tokens=3))
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        assert not reader.done()
        stream.push(chunk(1))
        assert await reader == [chunk(1)]
        stream.push(chunk(2))
        stream.push(chunk(3, end=LENGTH))
        assert stream.is_finished and stream.has_pending and not stream.was_cut
        assert await stream.take() == [chunk(2), chunk(3, end=LENGTH)]
        assert not stream.has_pending

    run(test())


def test_every_choice_ends_once() -> None:
    async def test() -> None:
        stream = RequestStream(request("r", max_tokens=3, num_choices=2))
        stream.push(chunk(1, end=LENGTH))
        stream.push(chunk(2))  # after its end
        stream.push(chunk(2, end=LENGTH))
        stream.push(chunk(9, choice=2))  # there is no such choice
        assert not stream.is_finished
        stream.fail("group_failed", "rank 1 died")
        stream.fail("group_failed", "again")
        stream.push(chunk(3, choice=1, end=LENGTH))
        taken = await stream.take()
        assert taken[0] == chunk(1, end=LENGTH)
        assert [(c.choice, c.finish_reason, c.error_code, c.error) for c in taken[1:]] == [
            (1, FinishReason.ERROR, "group_failed", "rank 1 died")
        ]
        assert stream.is_finished and stream.was_cut

    run(test())


def test_more_tokens_than_asked_for_end_the_choice() -> None:
    async def test() -> None:
        stream = RequestStream(request("r", max_tokens=2))
        stream.push(chunk(1, 2))
        stream.push(chunk(3))
        taken = await stream.take()
        assert [c.token_ids for c in taken] == [(1, 2), ()]
        assert taken[1].error_code == "protocol_error"
        assert stream.was_cut

    run(test())


def test_chunks_of_a_later_attempt_carry_the_readers_id() -> None:
    async def test() -> None:
        stream = RequestStream(request("r"))
        stream.push(chunk(1, name="r~2"))
        assert await stream.take() == [chunk(1)]

    run(test())


def test_a_reader_that_is_behind_gets_merged_chunks() -> None:
    async def test() -> None:
        stream = RequestStream(request("r", max_tokens=1000, num_choices=2))
        for position in range(500):
            stream.push(chunk(position))
            stream.push(chunk(1000 + position, choice=1))
        taken = await stream.take()
        assert len(taken) <= 66
        for choice in (0, 1):
            tokens = [token for c in taken if c.choice == choice for token in c.token_ids]
            assert tokens == list(range(1000 * choice, 1000 * choice + 500))

    run(test())


def test_merging_keeps_every_field() -> None:
    entry = TokenLogprob(token_id=1, logprob=-1.0)
    first = replace(chunk(1), num_cached_tokens=16, prompt_logprobs=(None, entry), logprobs=(entry,))
    second = replace(chunk(2, end=FinishReason.STOP), stop_token_id=2, logprobs=(entry,))
    assert merge([first, chunk(7, choice=1), second]) == [
        replace(
            first,
            token_ids=(1, 2),
            logprobs=(entry, entry),
            finish_reason=FinishReason.STOP,
            stop_token_id=2,
        ),
        chunk(7, choice=1),
    ]


def test_what_comes_at_once_is_not_the_reader_s_fault() -> None:
    """The choices of a beam search, each with all its log-probabilities; those of a long prompt."""
    entry = TokenLogprob(token_id=1, logprob=-1.0, top=tuple((token, -1.0) for token in range(20)))
    many = streams.MAX_BUFFERED_VALUES // 40

    async def test() -> None:
        search = RequestStream(
            replace(request("r", max_tokens=many, num_choices=4), beam=BeamParams(width=4))
        )
        for choice in range(4):
            found = chunk(*range(many), choice=choice, end=LENGTH)
            search.push(replace(found, logprobs=(entry,) * many))
        assert [each.error for each in await search.take()] == [None] * 4

        scored = RequestStream(request("r", max_tokens=2))
        scored.push(replace(chunk(1), prompt_logprobs=(entry,) * 2 * many))
        scored.push(chunk(2, end=LENGTH))
        assert [each.error for each in await scored.take()] == [None] * 2

    run(test())


def test_a_reader_that_is_hopelessly_behind_is_cut() -> None:
    async def test() -> None:
        stream = RequestStream(request("r", max_tokens=10**6))
        part = tuple(range(10_000))
        for _ in range(streams.MAX_BUFFERED_VALUES // 10_000 + 1):
            stream.push(chunk(*part))
        assert not stream.was_cut
        stream.push(chunk(1))
        assert stream.was_cut and stream.is_finished
        assert (await stream.take())[-1].error_code == "client_too_slow"

    run(test())
