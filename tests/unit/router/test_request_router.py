"""Serve's candidates in the order of the ranking; anything odd falls back, nothing raises."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from router.deployment import GroupSender
from router.request_router import RankedRequestRouter, order_candidates
from workers.group_start import group_id_of, pool_of


@dataclass(frozen=True)
class FakeDeployment:
    name: str = "unified"


@dataclass(frozen=True)
class FakeReplicaId:
    unique_id: str
    deployment_id: FakeDeployment = FakeDeployment()


@dataclass(frozen=True)
class FakeReplica:
    replica_id: FakeReplicaId


class FakePending:
    def __init__(self, kwargs: Any) -> None:
        self.kwargs = kwargs


class FakeCounter:
    def __init__(self, counted: list[str]) -> None:
        self._counted = counted

    def inc(self, *, tags: dict[str, str]) -> None:
        self._counted.append(tags["reason"])


A, B, C = (FakeReplica(FakeReplicaId(name)) for name in "abc")


def ranking(*names: str) -> list[str]:
    return [group_id_of("unified", name) for name in names]


def test_ranked_candidates_come_first_and_one_by_one() -> None:
    ordered = order_candidates([A, B, C], ranking("c", "a"))  # type: ignore[list-item]  # fakes
    assert ordered.batches == [[C], [A], [B]]
    assert not ordered.is_fallback


def test_groups_that_are_gone_are_passed_over() -> None:
    ordered = order_candidates([A, B], ranking("x", "b"))  # type: ignore[list-item]  # fakes
    assert ordered.batches == [[B], [A]]
    ordered = order_candidates([A, B], ranking("x"))  # type: ignore[list-item]  # fakes
    assert ordered == ([[A, B]], True)


@pytest.mark.parametrize(
    ("pending", "reason"),
    [
        (None, "unranked"),
        (FakePending({}), "unranked"),
        (FakePending({"ranked_groups": ranking("x")}), "ranked_groups_gone"),
        (FakePending({"ranked_groups": 7}), "error"),
        (FakePending(None), "error"),
    ],
)
def test_odd_calls_fall_back_to_all_candidates_and_are_counted(pending: Any, reason: str) -> None:
    router = object.__new__(RankedRequestRouter)  # Serve's constructor needs a running replica set
    counted: list[str] = []
    router._fallbacks = FakeCounter(counted)  # type: ignore[assignment]
    call = router.choose_replicas(candidate_replicas=[A, B], pending_request=pending)  # type: ignore[list-item]
    assert asyncio.run(call) == [[A, B]]
    assert counted == [reason]


class FakeHandle:
    """A pool's Serve handle: remembers calls; its first group takes everything."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.calls: list[tuple[Any, ...]] = []
        self.submit = self

    async def remote(self, client_id: str, request: Any, *, ranked_groups: tuple[str, ...]) -> str:
        self.calls.append((client_id, request, ranked_groups))
        return group_id_of(self.pool, "first")


def test_a_request_goes_to_the_pool_of_the_best_group() -> None:
    handles = {pool: FakeHandle(pool) for pool in ("unified", "prefill", "decode")}
    send = GroupSender(handles, FakeHandle)  # type: ignore[arg-type]  # fakes
    order = [group_id_of("decode", "b"), group_id_of("unified", "a")]
    assert asyncio.run(send(order, "router-1", "request")) == "decode-first"  # type: ignore[arg-type]
    assert handles["decode"].calls == [("router-1", "request", tuple(order))]
    assert handles["unified"].calls == handles["prefill"].calls == []
    assert [pool_of(group_id_of(pool, "a1-b2")) for pool in handles] == list(handles)


def test_a_pool_that_came_after_the_router_has_its_handle_when_it_is_needed() -> None:
    made: list[FakeHandle] = []

    def new_handle(pool: str) -> FakeHandle:
        made.append(FakeHandle(pool))
        return made[-1]

    send = GroupSender({"unified": FakeHandle("unified")}, new_handle)  # type: ignore[arg-type, dict-item]
    for name in ("r1", "r2"):
        order = [group_id_of("decode", "b"), group_id_of("unified", "a")]
        assert asyncio.run(send(order, "router-1", name)) == "decode-first"  # type: ignore[arg-type]
    (handle,) = made
    assert [call[1] for call in handle.calls] == ["r1", "r2"]
