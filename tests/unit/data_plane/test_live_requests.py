"""Whose request is whose, and how long its first token took."""

from __future__ import annotations

from dataclasses import replace

from workers.data_plane.live_requests import LiveRequests
from workers.types import FinishReason, RequestId, StageTimes, TokenChunk

NAME = RequestId("r")
TIMES = StageTimes(queue_s=0.0, transfer_s=0.0, compute_s=1.0)
EMPTY = TokenChunk(request_id=NAME, choice=0)


def seconds_to_first(*chunks: TokenChunk) -> tuple[int, float]:
    """Of one request that came at 10 s, with a chunk each second from 11 s on."""
    live = LiveRequests(4)
    live.add(NAME, (0,), "client", 10.0)
    for second, chunk in enumerate(chunks, 11):
        assert live.pass_on(chunk, float(second)) == "client"
    return live.first_tokens_total, live.first_token_seconds_total


def test_the_first_token_is_timed_once() -> None:
    first = replace(EMPTY, token_ids=(1,), times=TIMES)
    assert seconds_to_first(first, replace(EMPTY, token_ids=(2,))) == (1, 1.0)


def test_a_prompt_that_is_computed_for_others_has_no_first_token() -> None:
    assert seconds_to_first(replace(EMPTY, times=TIMES, finish_reason=FinishReason.LENGTH)) == (0, 0.0)


def test_a_search_is_timed_until_it_has_begun() -> None:
    """Its tokens come at its end, which says nothing of how long requests wait here."""
    begun, last = replace(EMPTY, times=TIMES), replace(EMPTY, token_ids=(1, 2))
    assert seconds_to_first(begun, replace(last, finish_reason=FinishReason.LENGTH)) == (1, 1.0)
