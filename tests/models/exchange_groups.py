"""Groups that read each other's KV blocks, and what a router would do with them, without one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tests.models.engine_groups import GREEDY, Answer, collect
from tests.models.exchange_rank import SECRET, group_start
from workers.config import GroupConfig
from workers.data_plane.channel import Channel, ClientIdentity, connect
from workers.data_plane.wire import (
    Abort,
    Accepted,
    Chunks,
    Message,
    Ping,
    Pong,
    Redirect,
    Refused,
    Stats,
    Submit,
)
from workers.ranks.host import LeaderHost
from workers.runtime.handshake import Rendezvous
from workers.runtime.order import RankOrder
from workers.types import (
    BegunChoice,
    GenerateRequest,
    GroupId,
    GroupStats,
    KVSource,
    RequestId,
    SamplingParams,
)

PATIENCE_S = 30.0
_Result = TypeVar("_Result")


class Loop:
    """An asyncio loop in a thread of its own, for everything that a test holds."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result], timeout_s: float = PATIENCE_S) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class Member:
    """A group as its clients see it."""

    def __init__(self, loop: Loop, name: str, address: tuple[str, int]) -> None:
        self.loop, self.name, self.address = loop, name, address
        self.stats = GroupStats()
        self.answers: dict[tuple[RequestId, int], Answer] = {}
        self.lost: str | None = None
        self._number = 0
        self._channel = loop.run(self._connect())

    def source(self, transfer_id: str | None = None) -> KVSource:
        return KVSource(
            group_id=GroupId(self.name),
            host=self.address[0],
            port=self.address[1],
            transfer_id=transfer_id,
        )

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_choices: int = 1,
        salt: str = "",
        source: KVSource | None = None,
        transfer_id: str | None = None,
        begun: tuple[BegunChoice, ...] = (),
    ) -> RequestId:
        self._number += 1
        request = GenerateRequest(
            request_id=RequestId(f"{self.name}-{self._number}"),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            num_choices=num_choices,
            cache_salt=salt,
            kv_source=source,
            transfer_id=transfer_id,
            begun=begun,
        )
        for choice in range(num_choices):
            self.answers[request.request_id, choice] = Answer()
        self.loop.run(self._send(Submit(client_id="test", request=request)))
        return request.request_id

    def abort(self, request_id: RequestId) -> None:
        self.loop.run(self._send(Abort(request_id=request_id)))

    def redirect(self, request_id: RequestId, source: KVSource | None) -> None:
        self.loop.run(self._send(Redirect(request_id=request_id, source=source)))

    def answer(self, request_id: RequestId, choice: int = 0, timeout_s: float = PATIENCE_S) -> Answer:
        """Waits for the end."""
        answer = self.answers[request_id, choice]
        wait_until(lambda: answer.finish is not None, f"the end of {request_id}", timeout_s)
        return answer

    def wait_for(self, what: str, timeout_s: float = PATIENCE_S, **stats: int) -> GroupStats:
        """Waits until the stats are these."""

        def told() -> dict[str, int]:
            return {name: getattr(self.stats, name) for name in stats}

        try:
            wait_until(lambda: told() == stats, f"{what} of {self.name}: {stats}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {told()}") from None
        return self.stats

    async def _connect(self) -> Channel:
        identity = ClientIdentity(client_id="test", secret=SECRET, subscribes=False)
        channel, self.info = await connect(
            *self.address, identity, on_message=self._message, on_closed=self._closed
        )
        return channel

    async def _send(self, message: Message) -> None:
        self._channel.send(message)

    def _message(self, channel: Channel, message: Message) -> None:
        match message:
            case Chunks():
                for chunk in message.chunks:
                    collect(self.answers[chunk.request_id, chunk.choice], chunk)
            case Stats():
                self.stats = message.stats
            case Ping():
                channel.send(Pong())
            case Refused():
                raise AssertionError(f"{message.request_id}: {message.message}")
            case Accepted() | _:
                pass

    def _closed(self, _channel: Channel, reason: str) -> None:
        self.lost = reason


class LocalMember(Member):
    """A group of one rank in this process."""

    def __init__(self, loop: Loop, name: str, config: GroupConfig) -> None:
        self.host, address = loop.run(self._start(name, config))
        super().__init__(loop, name, address)

    def close(self) -> None:
        self.loop.run(self.host.stop("the test is over"))

    async def _start(self, name: str, config: GroupConfig) -> tuple[LeaderHost, tuple[str, int]]:
        host = LeaderHost(group_start(config, name), host="127.0.0.1")
        await asyncio.to_thread(host.load)
        return host, await host.listen()


class ForeignMember(Member):
    """A group whose ranks are processes."""

    def __init__(self, loop: Loop, name: str, config: GroupConfig, ranks: Ranks) -> None:
        self.pids, address = ranks.start(name, config)
        self.pid = self.pids[0]
        super().__init__(loop, name, address)

    def kill(self, rank: int = 0) -> None:
        """SIGKILL for a rank; returns when all are gone."""
        os.kill(self.pids[rank], signal.SIGKILL)
        self._wait_for_end()

    def stop(self) -> None:
        """SIGSTOP for rank 0; returns when all its threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = list(Path(f"/proc/{self.pid}/task").iterdir())
        states = [task / "stat" for task in tasks]
        wait_until(
            lambda: all(stat.read_text().rsplit(")", 1)[1].split()[0] == "T" for stat in states),
            f"the stop of {self.name}",
        )

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        for pid in self.pids:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"the end of {self.name}")


class Ranks:
    """Starts ranks as processes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.models.exchange_rank"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, name: str, config: GroupConfig) -> tuple[list[int], tuple[str, int]]:
        """All of a group; the process of each rank, and where rank 0 serves."""
        rendezvous = Rendezvous(host="", store_port=0, control_port=0, token="")  # rank 0 opens one
        self._order(name, RankOrder(config=config, rank=0, rendezvous=rendezvous))
        if config.parallel.tensor_parallel > 1:
            rendezvous = Rendezvous(**self._hear()["says"])
        above = []
        for rank in range(1, config.parallel.tensor_parallel):
            self._order(name, RankOrder(config=config, rank=rank, rendezvous=rendezvous))
            above.append(self._hear()["pid"])
        heard = self._hear()
        host, port = heard["says"]
        return [heard["pid"], *above], (host, port)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()

    def _order(self, name: str, order: RankOrder) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {order.to_json()}\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        heard: dict[str, Any] = json.loads(self._process.stdout.readline())
        return heard


def through(
    prefill: Member,
    decode: Member,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    num_choices: int = 1,
    salt: str = "",
) -> RequestId:
    """What a router does for a pair: the request goes to one group, its prompt alone to the other."""
    transfer_id = secrets.token_hex(16)
    request_id = decode.submit(
        prompt, sampling, num_choices=num_choices, salt=salt, source=prefill.source(transfer_id)
    )
    prefill.submit(prompt, replace(sampling, max_tokens=0, min_tokens=0), salt=salt, transfer_id=transfer_id)
    return request_id


def wait_until(condition: Any, what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.002)
