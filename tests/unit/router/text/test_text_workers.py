from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from router.text.text_workers import TextBusy, TextTimeout, TextWorkers
from tests.unit.router.client import CHAT, COMPLETIONS, call, error_of
from tests.unit.router.fakes import byte_tokenizer, stack

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_results_and_exceptions() -> None:
    workers = TextWorkers(2, max_calls=100)

    def fails() -> None:
        raise KeyError("x")

    async def both() -> None:
        assert await workers.run(lambda: threading.current_thread().name, 5) == "tandem-text"
        with pytest.raises(KeyError):
            await workers.run(fails, 5)
        assert await asyncio.gather(*(workers.run(lambda i=i: i, 5) for i in range(50))) == list(range(50))

    run(both())
    workers.close()


def test_long_calls_leave_a_thread_to_the_short_ones() -> None:
    workers = TextWorkers(2, max_calls=100, max_queue_s=0.2)
    release = threading.Event()

    async def mixed() -> None:
        hold = [
            asyncio.create_task(workers.run(lambda: release.wait(10), 15, is_long=True)) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        assert await workers.run(lambda: "short", 5) == "short"
        for late in hold[1:]:
            with pytest.raises(TextBusy, match=r"not begun within 0\.2 s"):
                await late
        release.set()
        assert await hold[0] is True
        assert await workers.run(lambda: "long", 5, is_long=True) == "long"

    run(mixed())
    workers.close()


def test_hung_calls_are_given_up_and_their_threads_replaced() -> None:
    workers = TextWorkers(1, max_calls=100)
    release = threading.Event()

    async def hang() -> None:
        waiting = [asyncio.create_task(workers.run(lambda: release.wait(10), 0.1)) for _ in range(3)]
        after = asyncio.create_task(workers.run(lambda: "alive", 5))
        for task in waiting:
            with pytest.raises(TextTimeout):
                await task
        assert await after == "alive"

    run(hang())
    assert workers.num_replaced == 3
    release.set()
    assert run(workers.run(lambda: 1, 5)) == 1
    workers.close()


def test_calls_that_no_thread_begins_are_refused() -> None:
    workers = TextWorkers(1, max_calls=100, max_queue_s=0.1)
    release = threading.Event()

    async def wait() -> None:
        running = asyncio.create_task(workers.run(lambda: release.wait(10), 5))
        await asyncio.sleep(0)  # it is first in the queue
        with pytest.raises(TextBusy):
            await workers.run(lambda: 1, 0.05)
        release.set()
        assert await running

    run(wait())
    assert workers.num_replaced == 0
    workers.close()


def test_more_calls_than_may_wait_are_refused_at_once() -> None:
    workers = TextWorkers(1, max_calls=2)
    release = threading.Event()

    async def wait() -> None:
        running = [asyncio.create_task(workers.run(lambda: release.wait(10), 5)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TextBusy):
            await workers.run(lambda: 1, 5)
        release.set()
        assert await asyncio.gather(*running) == [True, True]
        assert await workers.run(lambda: 1, 5) == 1

    run(wait())
    workers.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_too_much_to_tokenize_is_overload(path: str, body: dict[str, Any]) -> None:
    router = stack(render_timeout_s=0.01, tokenize_timeout_s=0.01)
    router.service._preparer._workers = TextWorkers(0, max_calls=100, max_queue_s=0.0)
    response = call(router.app, path, body)
    assert (response.status_code, error_of(response)["code"]) == (503, "server_is_overloaded")
    assert float(response.headers["retry-after-ms"]) > 0


def test_cancelled_callers_leave_the_threads_working() -> None:
    workers = TextWorkers(1, max_calls=100)

    async def cancel() -> None:
        release = threading.Event()
        task = asyncio.create_task(workers.run(lambda: release.wait(10), 5))
        queued = asyncio.create_task(workers.run(lambda: 1 / 0, 5))
        await asyncio.sleep(0.05)
        for leaving in (task, queued):
            leaving.cancel()
        await asyncio.gather(task, queued, return_exceptions=True)
        release.set()
        assert await workers.run(lambda: 2, 5) == 2

    run(cancel())
    assert workers.num_replaced == 0
    workers.close()


def test_template_that_hangs_without_writing() -> None:
    tokenizer = type(byte_tokenizer())(
        byte_tokenizer().backend,
        chat_template="{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}x",
    )
    router = stack(tokenizer=tokenizer, render_timeout_s=0.2, tokenize_timeout_s=20.0)
    began = time.monotonic()
    response = call(router.app, CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert time.monotonic() - began < 5.0  # the time for tokenizing is not the template's
    assert "took longer than 0.2 s" in error_of(response)["message"]
    assert (response.status_code, error_of(response)["code"]) == (500, "template_error")
    assert call(router.app, COMPLETIONS, {"prompt": "a"}).status_code == 200


def test_a_call_may_earn_more_time() -> None:
    workers = TextWorkers(1, max_calls=100)
    earned: list[float] = []

    def first_half() -> str:
        time.sleep(0.05)
        earned.append(5.0)
        time.sleep(0.3)
        return "whole"

    assert run(workers.run(first_half, 0.2, extra_s=lambda: sum(earned))) == "whole"
    with pytest.raises(TextTimeout, match=r"longer than 0\.2 s"):
        run(workers.run(lambda: time.sleep(1.0), 0.2, extra_s=lambda: 0.0))
    assert workers.num_replaced == 1
    workers.close()
