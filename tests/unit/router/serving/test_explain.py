"""GET /explain/{id of an answer}: why a request went where it went; GET /load: what groups do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.dispatch.interface import Decision, PairState
from router.routing.policy import Choice
from tests.unit.router.client import COMPLETIONS, call, error_of
from tests.unit.router.fakes import INFO, READY, FakeDispatcher, stack
from workers.types import GroupId, GroupStats, RequestId, Role, SourceReads

A, B = GroupId("a"), GroupId("b")


def test_the_ranking_of_each_prompt() -> None:
    dispatcher = FakeDispatcher()
    app = stack(dispatcher).app
    answer_id = call(app, COMPLETIONS, {"prompt": ["x", "y"]}).json()["id"]
    request_id = answer_id.removeprefix("cmpl-")
    for index, request in enumerate(dispatcher.requests):
        assert request.request_id == f"{request_id}-{index}"
        dispatcher.decisions[request.request_id] = Decision(
            request_id=RequestId(request.request_id),
            num_attempts=1 + index,
            ranked=[Choice(B, 1.5, {"prefill": 1.0, "queue": 0.5}), Choice(A, 2.0, {"prefill": 2.0})],
            matches={B: 3},
            num_prompt_tokens=70,
            taken_by=B,
        )
    shown = call(app, f"/explain/{answer_id}").json()
    assert (shown["request"], shown["replica"], len(shown["prompts"])) == (request_id, "router", 2)
    assert shown["first_token"]["ttft_ms"] == pytest.approx(sum(shown["first_token"]["stages_ms"].values()))
    assert shown["prompts"][1] == {
        "taken_by": "b",
        "num_attempts": 2,
        "num_moves": 0,
        "num_prompt_tokens": 70,
        "fetch": None,
        "ranked": [
            {
                "group": "b",
                "source": None,
                "fetched_tokens": 0,
                "matched_blocks": 3,
                "cost_ms": 1.5,
                "terms_ms": {"prefill": 1.0, "queue": 0.5},
            },
            {
                "group": "a",
                "source": None,
                "fetched_tokens": 0,
                "matched_blocks": 0,
                "cost_ms": 2.0,
                "terms_ms": {"prefill": 2.0},
            },
        ],
    }
    assert call(app, f"/explain/{request_id}").json() == shown


def test_an_unknown_request() -> None:
    response = call(stack(FakeDispatcher()).app, "/explain/cmpl-0123")
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_request")
    assert "cmpl-0123" in error_of(response)["message"]


def test_roles_and_pairs_are_in_the_load() -> None:
    pair = PairState(GroupId("p"), GroupId("d"), 3, 1, 2.5e8, 7)
    reads = SourceReads(
        group_id=GroupId("p"), transport="memory", num_open=1, num_done=4, num_blocks=3, seconds=0.5
    )
    stats = GroupStats(kv_leases=2, kv_transferring_blocks=5, kv_sources=(reads,))
    info = replace(INFO, kv_bytes_per_block=100, exchange_problem="no port")
    dispatcher = FakeDispatcher(
        states=(replace(READY, role=Role.DECODE, info=info, stats=stats),), known_pairs=(pair,)
    )
    load = call(stack(dispatcher).app, "/load").json()
    (group,) = load["groups"]
    assert (group["role"], group["leases"], group["transferring_blocks"]) == ("decode", 2, 5)
    assert (group["exchanges_kv"], group["exchange_problem"]) == (False, "no port")
    expected = {"source": "p", "transport": "memory", "open": 1, "done": 4, "failed": 0}
    assert group["reads"] == [expected | {"bytes": 300, "seconds": 0.5}]
    assert load["pairs"] == [
        {"source": "p", "reader": "d", "num_reads": 3, "num_failed": 1, "bytes_per_s": 2.5e8, "num_bytes": 7}
    ]
