"""Why a request went where it went, and what it waited for, for people."""

from __future__ import annotations

from typing import Any

from router.api.errors import ApiError, quoted
from router.dispatch.interface import Decision, Dispatcher, Fetch
from router.telemetry.waterfall import FirstToken
from workers.types import RequestId


def prompt_id(request_id: str, index: int) -> RequestId:
    """What groups call a prompt of a request."""
    return RequestId(f"{request_id}-{index}")


def request_of(answer_id: str) -> str:
    """The request that an answer is of: what the log calls it."""
    return answer_id.rpartition("-")[2]


def explanation(dispatcher: Dispatcher, answer_id: str, first: FirstToken | None = None) -> dict[str, Any]:
    """The placement of every prompt of a request, by the id of its answer or of the log; and where the time
    to its first token went, of `router.telemetry.waterfall.STAGES`. null: it has had none.

    Only numbers and names of groups, nothing of what was said. Raises ApiError 404.
    """
    request_id = request_of(answer_id)
    prompts: list[dict[str, Any]] = []
    while (decision := dispatcher.explain(prompt_id(request_id, len(prompts)))) is not None:
        prompts.append(_shown(decision))
    if not prompts and first is None:
        raise ApiError(
            404,
            f"This router replica remembers no request {quoted(answer_id)}. Give the id of an answer; each "
            "replica knows the last requests that it has placed itself.",
            code="unknown_request",
        )
    return {"request": request_id, "first_token": _waterfall(first), "prompts": prompts}


def _waterfall(found: FirstToken | None) -> dict[str, Any] | None:
    if found is None:
        return None
    stages = {stage: seconds * 1000.0 for stage, seconds in found.stages.items()}
    return {"ttft_ms": found.ttft_s * 1000.0, "stages_ms": stages}


def _shown(decision: Decision) -> dict[str, Any]:
    return {
        "taken_by": decision.taken_by,
        "num_attempts": decision.num_attempts,
        "num_moves": decision.num_moves,
        "num_prompt_tokens": decision.num_prompt_tokens,
        "fetch": _fetch(decision.fetch),
        "ranked": [  # by the last attempt, best first
            {
                "group": choice.group_id,
                "source": choice.source,
                "fetched_tokens": choice.fetched_tokens,
                "matched_blocks": decision.matches.get(choice.group_id, 0),
                "cost_ms": choice.cost_ms,
                "terms_ms": dict(choice.terms),
            }
            for choice in decision.ranked
        ],
    }


def _fetch(fetch: Fetch | None) -> dict[str, Any] | None:
    """What the last attempt read of the prompt from another group; null: it computed all that it lacked."""
    if fetch is None:
        return None
    return {
        "source": fetch.source,
        "wanted_tokens": fetch.wanted_tokens,
        "pulled_tokens": fetch.pulled_tokens,
        "prefills": [{"group": group_id, "outcome": outcome} for group_id, outcome in fetch.prefills],
    }
