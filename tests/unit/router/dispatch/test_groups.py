from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from router.dispatch.dispatcher import SocketDispatcher
from router.dispatch.link import LinkLimits
from tests.unit.data_plane.fakes import (
    FAST,
    SECRET,
    Cluster,
    collect,
    expected_tokens,
    request,
    run,
    tokens,
    until,
    with_cluster,
)
from workers.data_plane.wire import Welcome
from workers.types import GenerateRequest, GroupAddress, GroupId

A, B = GroupId("a"), GroupId("b")


def ready(router: SocketDispatcher) -> list[GroupId]:
    return [state.group_id for state in router.groups() if state.is_ready]


def test_a_group_is_ready_after_a_real_token_only() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a", steps=False)
        router = await groups.add_router(ready=0)
        await until(lambda: len(a.engine.submitted) == 1)
        await asyncio.sleep(0.05)
        (state,) = router.groups()
        assert (state.info.num_blocks, state.is_ready) == (1000, False)
        a.engine.step()
        await until(lambda: ready(router) == [A])
        assert a.engine.submitted[0].startswith("canary-")
        await until(lambda: a.server.num_requests == 0)

    with_cluster(test)


def test_a_group_with_an_address_that_cannot_be_is_followed_when_it_has_another() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        groups.listed = [replace(a.address, port=70_000)]
        router = await groups.add_router(ready=0)
        await asyncio.sleep(0.1)
        assert ready(router) == []
        groups.listed = [a.address]
        await until(lambda: ready(router) == [A])

    with_cluster(test)


def test_a_second_welcome_ends_the_connection() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        (link,) = router._table.ready_links()
        channel = next(client.channel for client in a.server._clients.values() if client.subscribes)
        channel.send(Welcome(info=link.info, mac=b""))
        assert await link.closed == "WELCOME after the greeting"

    with_cluster(test)


def test_a_canary_that_another_group_answers_does_not_count() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        await groups.add_group("b")

        async def astray(_order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            return await groups.send([B], client_id, wanted)

        router = await groups.add_router(send=astray, ready=1)
        await asyncio.sleep(0.1)
        assert ready(router) == [B]

    with_cluster(test)


def test_a_group_that_cannot_be_reached_is_listed_and_tried_again() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        groups.listed = [replace(a.address, port=1)]
        router = await groups.add_router(ready=0)
        await until(lambda: len(router.groups()) == 1)
        (state,) = router.groups()
        assert (state.group_id, state.epoch, state.is_ready) == (A, 1, False)
        groups.listed = [a.address]
        await until(lambda: ready(router) == [A])

    with_cluster(test)


def test_a_rebuilt_group_is_followed_and_its_old_epoch_is_not_heard() -> None:
    async def test(groups: Cluster) -> None:
        old = await groups.add_group("a", epoch=1)
        router = await groups.add_router()
        task = asyncio.create_task(collect(router, request("r", max_tokens=600)))
        await until(lambda: "r" in old.engine.running)
        new = await groups.add_group("a", epoch=2)  # the old one still runs and sends
        assert tokens(await task) == expected_tokens([1, 2, 3], 0, 600)
        assert [name for name in new.engine.submitted if name.startswith("r~")]
        await until(lambda: [s.epoch for s in router.groups() if s.is_ready] == [2])
        await until(lambda: not old.engine.running)  # told by the end of the connection
        assert len(tokens(await collect(router, request("s", max_tokens=4)))) == 4
        groups.listed = [old.address]  # a late answer of the directory
        await asyncio.sleep(0.1)
        assert [s.epoch for s in router.groups()] == [2]

    with_cluster(test)


def test_a_group_that_moves_while_it_is_greeted_is_followed_too() -> None:
    async def test(groups: Cluster) -> None:
        old = await groups.add_group("a", epoch=1)
        is_connecting, go_on = asyncio.Event(), asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Passes everything on, but not before the test says so."""
            is_connecting.set()
            await go_on.wait()
            upstream, out = await asyncio.open_connection(old.address.host, old.address.port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65_536):
                    sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, out), pump(upstream, writer))

        proxy = await asyncio.start_server(slow, "127.0.0.1", 0)
        groups.listed = [replace(old.address, port=proxy.sockets[0].getsockname()[1])]
        limits = replace(FAST, groups=replace(FAST.groups, link=LinkLimits(connect_timeout_s=8.0)))
        router = await groups.add_router(ready=0, limits=limits)
        await is_connecting.wait()
        await groups.add_group("a", epoch=2)
        await asyncio.sleep(0.1)  # for the router to hear of it
        go_on.set()
        await until(lambda: [s.epoch for s in router.groups() if s.is_ready] == [2])
        proxy.close()

    with_cluster(test)


def test_a_port_that_another_group_has_taken_over_is_not_believed() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        groups.listed = [replace(a.address, epoch=7)]
        router = await groups.add_router(ready=0)
        await asyncio.sleep(0.2)
        assert ready(router) == []
        assert [name for name, _ in groups.sent] == []

    with_cluster(test)


def test_a_lost_connection_is_made_again() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        link = router._table.links()[A]
        task = asyncio.create_task(collect(router, request("r", max_tokens=600)))
        await until(lambda: "r" in a.engine.running)
        link.close("the network is gone")
        await until(lambda: "r" in a.engine.aborted)
        assert tokens(await task) == expected_tokens([1, 2, 3], 0, 600)  # over the next connection
        await until(lambda: ready(router) == [A] and router._table.links()[A] is not link)
        assert len(tokens(await collect(router, request("s", max_tokens=4)))) == 4

    with_cluster(test)


def test_a_group_that_falls_silent_is_given_up_in_time() -> None:
    async def hold(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Half of a proxy: passes on, until it is told to hold everything back."""
        upstream, out = await asyncio.open_connection(target.host, target.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                if stopped.is_set():
                    await asyncio.sleep(5.0)
                sink.write(data)

        await asyncio.wait(
            [asyncio.ensure_future(pump(upstream, writer)), asyncio.ensure_future(pump(_reader, out))],
            return_when=asyncio.FIRST_COMPLETED,
        )
        writer.close()
        out.close()

    async def test(groups: Cluster) -> None:
        nonlocal target
        a = await groups.add_group("a")
        target = a.address
        proxy = await asyncio.start_server(hold, "127.0.0.1", 0)
        groups.listed = [replace(a.address, port=proxy.sockets[0].getsockname()[1])]
        router = await groups.add_router()
        task = asyncio.create_task(collect(router, request("r", max_tokens=10**6)))
        await until(lambda: "r" in a.engine.running)
        stopped.set()
        start = asyncio.get_running_loop().time()
        chunks = await task
        assert asyncio.get_running_loop().time() - start > 0.4  # dead_after_s is 0.6
        assert chunks[-1].error is not None and "was silent for" in chunks[-1].error
        assert ready(router) == []
        proxy.close()

    target: GroupAddress
    stopped = asyncio.Event()
    with_cluster(test)


def test_a_router_that_was_stopped_itself_does_not_blame_the_group() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        link = router._table.links()[A]
        time.sleep(0.9)  # noqa: ASYNC251 (the whole process stands still; dead_after_s is 0.6)
        await asyncio.sleep(0.3)
        assert router._table.links()[A] is link and ready(router) == [A]
        assert a.server.client_ids == ["front-a", router.client_id]

    with_cluster(test)


def test_unlisted_groups_finish_what_they_have_and_are_let_go() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        await groups.add_group("b")
        router = await groups.add_router()
        groups.listed = [address for address in groups.listed if address.group_id == A]
        await until(lambda: ready(router) == [A])
        task = asyncio.create_task(collect(router, request("r", max_tokens=600)))
        await until(lambda: "r" in a.engine.running)
        groups.listed = []
        await until(lambda: ready(router) == [])
        await until(lambda: [state.group_id for state in router.groups()] == [A])
        assert len(tokens(await task)) == 600
        await until(lambda: router.groups() == [])
        await until(lambda: a.server.client_ids == ["front-a"])
        groups.listed = [a.address]
        await until(lambda: ready(router) == [A])

    with_cluster(test)


def test_draining_groups_take_nothing_new() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        await groups.add_group("b")
        router = await groups.add_router()
        groups.listed[0] = replace(a.address, is_draining=True)
        await until(lambda: ready(router) == [B])
        for i in range(4):
            await collect(router, request(f"r{i}", [i]))
        assert {group for name, group in groups.sent if name.startswith("r")} == {B}

    with_cluster(test)


def test_a_directory_that_fails_leaves_the_last_list_in_force(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with AsyncExitStack() as stack:
            groups = Cluster(stack)
            await groups.add_group("a")
            is_down = False

            async def source() -> Sequence[GroupAddress]:
                if is_down:
                    raise ConnectionError("the controller is gone")
                return groups.listed

            router = SocketDispatcher(secret=SECRET, source=source, send=groups.send, limits=FAST)
            await router.start()
            stack.push_async_callback(router.stop)
            await until(lambda: ready(router) == [A])
            is_down = True
            await until(lambda: "the controller is gone" in caplog.text)
            await asyncio.sleep(0.2)
            assert len(tokens(await collect(router, request("r", max_tokens=4)))) == 4

    with caplog.at_level(logging.WARNING):
        run(test())
