"""GET /explain/{id of an answer}: why a request went where it went."""

from __future__ import annotations

from router.dispatch.interface import Decision
from router.routing.policy import Choice
from tests.unit.router.client import COMPLETIONS, call, error_of
from tests.unit.router.fakes import FakeDispatcher, stack
from workers.types import GroupId, RequestId

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
    assert shown["prompts"][1] == {
        "taken_by": "b",
        "num_attempts": 2,
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
