"""An update to another model: a router uses groups of its own model only, and the new one waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.dispatch.dispatcher import SocketDispatcher
from router.dispatch.interface import Unavailable
from tests.unit.data_plane.fakes import FAST, SECRET, Cluster, collect, info, request, until, with_cluster
from workers.types import GroupId

OLD, NEW = "the old model", "the new model"


async def router_of(groups: Cluster, model_hash: str) -> SocketDispatcher:
    router = SocketDispatcher(
        secret=SECRET, source=groups.list, send=groups.send, limits=FAST, model_hash=model_hash
    )
    await router.start()
    groups.stack.push_async_callback(router.stop)
    return router


async def add_group(groups: Cluster, name: str, model_hash: str) -> None:
    await groups.add_group(name, described=replace(info(name), model_hash=model_hash))


def shown(router: SocketDispatcher) -> list[GroupId]:
    return [state.group_id for state in router.groups() if state.is_ready]


def test_a_router_uses_and_shows_groups_of_its_own_model_only() -> None:
    async def test(groups: Cluster) -> None:
        await add_group(groups, "a", OLD)
        await add_group(groups, "b", NEW)
        old, new = await router_of(groups, OLD), await router_of(groups, NEW)
        await until(lambda: (shown(old), shown(new)) == (["a"], ["b"]))
        for number in range(4):
            await collect(old, request(f"old-{number}", max_tokens=1))
            await collect(new, request(f"new-{number}", max_tokens=1))
        assert {group for name, group in groups.sent if name.startswith("old")} == {"a"}
        assert {group for name, group in groups.sent if name.startswith("new")} == {"b"}
        assert [state.group_id for state in new.groups()] == ["b"]

    with_cluster(test)


def test_with_groups_of_another_model_alone_nothing_is_answered() -> None:
    async def test(groups: Cluster) -> None:
        await add_group(groups, "a", OLD)
        router = await router_of(groups, NEW)
        with pytest.raises(TimeoutError):
            await router.settle(0.3)
        with pytest.raises(Unavailable):
            await collect(router, request("r"))
        assert router.groups() == [] and not groups.sent

    with_cluster(test)


def test_the_new_router_waits_for_the_first_group_of_its_model() -> None:
    async def test(groups: Cluster) -> None:
        await add_group(groups, "a", OLD)
        router = await router_of(groups, NEW)
        settling = asyncio.create_task(router.settle(5.0))
        await asyncio.sleep(0.2)
        assert not settling.done()
        await add_group(groups, "b", NEW)
        await settling
        assert shown(router) == ["b"]

    with_cluster(test)


def test_it_waits_no_longer_once_the_old_groups_take_nothing() -> None:
    async def test(groups: Cluster) -> None:
        await add_group(groups, "a", OLD)
        router = await router_of(groups, NEW)
        settling = asyncio.create_task(router.settle(5.0))
        await asyncio.sleep(0.1)
        groups.listed = [replace(address, is_draining=True) for address in groups.listed]
        await settling

    with_cluster(test)


@pytest.mark.parametrize("model_hash", [OLD, None])
def test_a_start_without_groups_of_another_model_waits_for_nothing(model_hash: str | None) -> None:
    async def test(groups: Cluster) -> None:
        if model_hash is not None:
            await groups.add_group("a", steps=False, described=replace(info("a"), model_hash=model_hash))
        router = await router_of(groups, OLD)
        await router.settle(1.0)
        assert shown(router) == []

    with_cluster(test)
