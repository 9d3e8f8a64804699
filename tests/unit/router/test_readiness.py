"""When a router is ready, and requests that come while no group can take them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx

from router.dispatch.interface import GroupState
from tests.unit.router.client import (
    COMPLETIONS,
    call,
    error_of,
)
from tests.unit.router.fakes import INFO, READY, FakeDispatcher, stack
from workers.types import GroupId, GroupStats, Role


def test_no_group_at_all() -> None:
    app = stack(FakeDispatcher(states=())).app
    response = call(app, COMPLETIONS, {"prompt": "a"})
    assert (response.status_code, error_of(response)["code"]) == (503, "no_ready_group")
    assert call(app, "/health").status_code == 503
    assert call(app, "/ready").status_code == 503
    assert call(app, "/v1/models").json()["data"][0]["max_model_len"] is None
    assert call(app, COMPLETIONS, {"prompt": "a", "n": 0}).status_code == 400


def test_a_request_waits_for_the_first_group_of_a_pool_at_zero() -> None:
    router = stack(FakeDispatcher(states=()), group_wait_s=5.0, max_queued_requests=2)
    assert (call(router.app, "/ready").status_code, call(router.app, "/health").status_code) == (200, 200)

    async def ask() -> list[httpx.Response]:
        router.dispatcher.comes = asyncio.Event()
        transport = httpx.ASGITransport(app=router.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            waiting = [
                asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "stream": stream}))
                for stream in (False, True)
            ]
            while router.service.admission.num_queued < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            refused = await client.post(COMPLETIONS, json={"prompt": "a"})
            router.dispatcher.comes.set()
            return [refused, *await asyncio.gather(*waiting)]

    refused, whole, streamed = asyncio.run(asyncio.wait_for(ask(), 10))
    assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
    assert whole.json()["choices"][0]["text"] == "hello"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert router.service.admission.num_inflight == router.service.admission.num_queued == 0


def test_a_request_waits_for_a_group_no_longer_than_its_limits() -> None:
    router = stack(FakeDispatcher(states=(), max_wait_s=0.05))
    router.dispatcher.comes = asyncio.Event()
    response = call(router.app, COMPLETIONS, {"prompt": "a"})
    assert (response.status_code, error_of(response)["code"]) == (503, "no_ready_group")
    patient = stack(FakeDispatcher(states=()))
    patient.dispatcher.comes = asyncio.Event()
    late = call(patient.app, COMPLETIONS, {"prompt": "a"}, headers={"x-request-timeout-seconds": "0.05"})
    assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")


def test_a_group_that_leaves_does_not_make_the_router_unready() -> None:
    leaving = replace(READY, group_id=GroupId("g1"), is_ready=False, is_leaving=True)
    app = stack(FakeDispatcher(states=(READY, leaving))).app
    assert call(app, "/ready").json() == {"ready": True}
    assert call(stack(FakeDispatcher(states=(leaving,))).app, "/ready").status_code == 503


def test_ready_needs_every_group() -> None:
    # Listed, but not connected: it has said nothing of its model yet.
    other = GroupState(group_id=GroupId("g1"), epoch=1, info=None, stats=GroupStats(), is_ready=False)
    dispatcher = FakeDispatcher()
    dispatcher.states = (*dispatcher.states, other)
    app = stack(dispatcher).app
    assert call(app, "/ready").json() == {"ready": False}
    assert call(app, "/health").status_code == 200
    assert call(app, "/v1/models").json()["data"][0]["max_model_len"] == INFO.max_model_len


def test_prefill_groups_alone_serve_nobody() -> None:
    small = replace(INFO, group_id=GroupId("p"), role=Role.PREFILL, max_model_len=100)
    prefill = replace(READY, group_id=small.group_id, info=small, role=Role.PREFILL)
    alone = stack(FakeDispatcher(states=(prefill,))).app
    assert (call(alone, "/ready").status_code, call(alone, "/health").status_code) == (503, 503)
    assert error_of(call(alone, COMPLETIONS, {"prompt": "a"}))["code"] == "no_ready_group"
    decode = replace(READY, role=Role.DECODE)
    both = stack(FakeDispatcher(states=(prefill, decode))).app
    assert (call(both, "/ready").status_code, call(both, "/health").status_code) == (200, 200)
    assert call(both, "/v1/models").json()["data"][0]["max_model_len"] == INFO.max_model_len
    starting = stack(FakeDispatcher(states=(prefill, replace(decode, is_ready=False)))).app
    assert (call(starting, "/ready").status_code, call(starting, "/health").status_code) == (503, 503)
