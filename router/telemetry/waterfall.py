"""Where the time to a request's first token went.

    admit         its fields were checked, and whether there is room for it; a wait for the first group
    render        its messages became a text
    tokenize      the text became token ids, with the wait for a thread
    route         a group was chosen
    queue         it waited for its turn in the group, and in the prefill group before it, if there was one
    prefill       its prompt was computed, by the group itself or by the prefill group
    transfer      its group waited for KV blocks, less the time in which the prefill group computed them
    first_decode  with a prefill group: its group computed what was left of the prompt, and the first token
    detokenize    the token became text
    serve         the rest: handing the request over, and the way of the first token back

Each process measures durations with its own monotonic clock, and only durations travel: no clock is compared
with another. So `serve` is what the router saw pass and nobody else accounts for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from router.dispatch.interface import Decision
from workers.types import StageTimes

STAGES: Final = (
    "admit",
    "render",
    "tokenize",
    "route",
    "serve",
    "queue",
    "prefill",
    "transfer",
    "first_decode",
    "detokenize",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTimes:
    """How long a request took until it was tokenized, seconds."""

    admit_s: float = 0.0
    render_s: float = 0.0
    tokenize_s: float = 0.0


class FirstToken(NamedTuple):
    """How long a request waited for its first token, and for what."""

    ttft_s: float
    stages: Mapping[str, float]  # seconds, by STAGES; they add up to the whole


def waterfall(
    ttft_s: float,
    *,
    prepare: PrepareTimes,
    decision: Decision | None,
    times: StageTimes | None,
    detokenize_s: float,
) -> dict[str, float]:
    """Seconds by stage, all of STAGES, which add up to `ttft_s`.

    `decision`: of the prompt that had the first token, if it is remembered. `times`: as the first chunk says.
    """
    stages = dict.fromkeys(STAGES, 0.0)
    stages["admit"], stages["render"] = prepare.admit_s, prepare.render_s
    stages["tokenize"], stages["detokenize"] = prepare.tokenize_s, detokenize_s
    if decision is not None:
        stages["route"] = decision.route_s
    if times is not None:
        fetch = decision.fetch if decision is not None else None
        _add_group(stages, times, fetch.prefill_times if fetch is not None else None)
    # Rounding apart, the parts are never longer than the whole: they follow each other.
    stages["serve"] = max(0.0, ttft_s - sum(stages.values()))
    return stages


def _add_group(stages: dict[str, float], times: StageTimes, prefill: StageTimes | None) -> None:
    stages["queue"], stages["transfer"] = times.queue_s, times.transfer_s
    if prefill is None:
        stages["prefill"] = times.compute_s
        return
    # The group waited for the blocks while the prefill group queued and computed; what exceeds that wait was
    # over before it began, or went on beside it, and did not delay the answer.
    computing = min(prefill.compute_s, times.transfer_s)
    queueing = min(prefill.queue_s, times.transfer_s - computing)
    stages["prefill"] = computing
    stages["queue"] += queueing
    stages["transfer"] -= computing + queueing
    stages["first_decode"] = times.compute_s
