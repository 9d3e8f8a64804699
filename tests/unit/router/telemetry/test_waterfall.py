"""Where the time to a first token went: the parts, and that they add up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import pytest

from router.dispatch.interface import Decision, Fetch
from router.telemetry.waterfall import STAGES, PrepareTimes, waterfall
from tests.unit.router.client import CHAT, COMPLETIONS, call
from tests.unit.router.fakes import FakeDispatcher, says, stack
from tests.unit.router.scrapes import only
from workers.types import GenerateRequest, GroupId, RequestId, StageTimes, TokenChunk

PREPARE = PrepareTimes(admit_s=0.001, render_s=0.002, tokenize_s=0.003)
ALONE = StageTimes(queue_s=0.1, transfer_s=0.0, compute_s=0.2)


def decided(fetch: Fetch | None = None) -> Decision:
    return Decision(
        request_id=RequestId("r-0"), num_attempts=1, ranked=(), matches={}, num_prompt_tokens=9, fetch=fetch,
        route_s=0.004,
    )  # fmt: skip


def parts(**expected: float) -> dict[str, float]:
    return pytest.approx({**dict.fromkeys(STAGES, 0.0), **expected})  # type: ignore[no-any-return]


def test_one_group_does_all() -> None:
    stages = waterfall(0.35, prepare=PREPARE, decision=decided(), times=ALONE, detokenize_s=0.005)
    assert stages == parts(
        admit=0.001, render=0.002, tokenize=0.003, route=0.004, queue=0.1, prefill=0.2, detokenize=0.005,
        serve=0.035,
    )  # fmt: skip
    assert sum(stages.values()) == pytest.approx(0.35)


def test_a_prefill_group_computed_while_the_other_waited() -> None:
    fetch = Fetch(source=GroupId("p"), wanted_tokens=8)
    fetch.prefill_times = StageTimes(queue_s=0.05, transfer_s=0.0, compute_s=0.4)
    times = StageTimes(queue_s=0.02, transfer_s=0.5, compute_s=0.03)
    stages = waterfall(0.6, prepare=PREPARE, decision=decided(fetch), times=times, detokenize_s=0.0)
    assert stages == parts(
        admit=0.001, render=0.002, tokenize=0.003, route=0.004, serve=0.04,
        queue=0.07, prefill=0.4, transfer=0.05, first_decode=0.03,
    )  # fmt: skip


def test_what_a_prefill_group_did_besides_delayed_nothing() -> None:
    """It took longer than the answering group waited, which computed the rest itself."""
    fetch = Fetch(source=None, wanted_tokens=8)
    fetch.prefill_times = StageTimes(queue_s=0.3, transfer_s=0.0, compute_s=0.4)
    times = StageTimes(queue_s=0.0, transfer_s=0.5, compute_s=0.1)
    stages = waterfall(0.61, prepare=PREPARE, decision=decided(fetch), times=times, detokenize_s=0.0)
    assert (stages["prefill"], stages["queue"], stages["transfer"]) == pytest.approx((0.4, 0.1, 0.0))
    assert sum(stages.values()) == pytest.approx(0.61)


def test_blocks_of_a_neighbour() -> None:
    fetch = Fetch(source=GroupId("n"), wanted_tokens=8)
    times = StageTimes(queue_s=0.0, transfer_s=0.03, compute_s=0.1)
    stages = waterfall(0.2, prepare=PREPARE, decision=decided(fetch), times=times, detokenize_s=0.0)
    assert (stages["transfer"], stages["prefill"], stages["first_decode"]) == (0.03, 0.1, 0.0)


def test_without_words_of_the_group_all_of_its_part_is_left_over() -> None:
    stages = waterfall(0.3, prepare=PREPARE, decision=None, times=None, detokenize_s=0.0)
    assert stages == parts(admit=0.001, render=0.002, tokenize=0.003, serve=0.294)


class SlowGroup(FakeDispatcher):
    """Takes a while, and says what for."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        await asyncio.sleep(0.1)
        async for chunk in super().generate(request):
            yield chunk


def timed(request: GenerateRequest) -> Iterator[TokenChunk]:
    times = StageTimes(queue_s=0.03, transfer_s=0.0, compute_s=0.06)
    for number, chunk in enumerate(says("hello")(request)):
        yield replace(chunk, times=None if number else times)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_stages_of_a_request_explain_its_first_token(path: str) -> None:
    app = stack(SlowGroup(timed)).app
    body = {"prompt": "ab"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab"}]}
    answer = call(app, path, {**body, "max_tokens": 4}).json()
    first = call(app, f"/explain/{answer['id']}").json()["first_token"]
    text = call(app, "/metrics").text
    ttft_s = only(text, "ttft_seconds_sum")
    stages = {stage: only(text, "stage_seconds_sum", stage=stage) for stage in STAGES}
    assert sum(stages.values()) == pytest.approx(ttft_s, rel=1e-6)
    assert first["ttft_ms"] == pytest.approx(ttft_s * 1e3)
    assert first["stages_ms"] == pytest.approx({stage: seconds * 1e3 for stage, seconds in stages.items()})
    assert (stages["queue"], stages["prefill"], stages["transfer"]) == pytest.approx((0.03, 0.06, 0.0))
    assert only(text, "queue_seconds_sum") == pytest.approx(0.03)
    assert (stages["render"] > 0) == (path == CHAT)
    assert 0.01 <= stages["serve"] < 0.2  # of the 0.1 s that it took, what the group does not account for
    assert stages["admit"] > 0 and stages["tokenize"] > 0 and stages["detokenize"] > 0
