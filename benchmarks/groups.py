"""Whole groups without a router for benchmarks: each a process on cores of its own, with a client that times.

python -m benchmarks.groups        # one group, its order as a line of JSON on stdin, until stdin ends
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from workers.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    TransferConfig,
)
from workers.data_plane.channel import Channel, ClientIdentity, connect
from workers.data_plane.wire import Abort, Chunks, Message, Ping, Pong, Refused, Submit
from workers.group_start import GroupStart
from workers.ranks.host import LeaderHost
from workers.types import GenerateRequest, GroupId, KVSource, RequestId, Role, SamplingParams

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What one group is."""

    name: str
    model: str  # folder
    cores: tuple[int, ...]
    secret: str  # hex
    num_blocks: int
    max_prefill_chunk: int | None = None
    transport: str = "auto"


@dataclass(slots=True)
class Run:
    """One request: when it was sent, and when each of its tokens came."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None

    @property
    def first_s(self) -> float:
        """From the sending to the first token."""
        return self.token_s[0] - self.sent_s


class Group:
    """A group in another process, and the connection to it. Made in an asyncio loop."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.groups"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(len(plan.cores))},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(plan)) + "\n")
        self._process.stdin.flush()
        self._runs: dict[RequestId, Run] = {}
        self._channel: Channel | None = None
        self._address = ("", 0)

    async def connect(self) -> None:
        """Waits until it serves."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_TIMEOUT_S):
            line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise RuntimeError(f"group {self.plan.name} did not start; it said why above")
        host, port = json.loads(line)
        self._address = host, port
        identity = ClientIdentity(
            client_id="benchmark", secret=bytes.fromhex(self.plan.secret), subscribes=False
        )
        self._channel, _ = await connect(
            host, port, identity, on_message=self._message, on_closed=self._closed, timeout_s=_TIMEOUT_S
        )

    def source(self, transfer_id: str | None = None) -> KVSource:
        host, port = self._address
        return KVSource(group_id=GroupId(self.plan.name), host=host, port=port, transfer_id=transfer_id)

    def send(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        source: KVSource | None = None,
        transfer_id: str | None = None,
    ) -> tuple[RequestId, Run]:
        """Begins a request of exactly max_tokens tokens."""
        assert self._channel is not None, "connect() first"
        request = GenerateRequest(
            request_id=RequestId(secrets.token_hex(8)),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            cache_salt=salt,
            kv_source=source,
            transfer_id=transfer_id,
        )
        run = self._runs[request.request_id] = Run(time.perf_counter())
        self._channel.send(Submit(client_id="benchmark", request=request))
        return request.request_id, run

    async def finish(self, prompt: Sequence[int], max_tokens: int, **how: Any) -> Run:
        """A request from its sending to its end. Raises RuntimeError when it fails."""
        _, run = self.send(prompt, max_tokens, **how)
        async with asyncio.timeout(_TIMEOUT_S):
            await run.is_over.wait()
        if run.error is not None:
            raise RuntimeError(f"group {self.plan.name}: {run.error}")
        return run

    def abort(self, request_id: RequestId) -> None:
        assert self._channel is not None
        self._channel.send(Abort(request_id=request_id))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20.0)
        self._process.stdout.close()

    def _message(self, channel: Channel, message: Message) -> None:
        now_s = time.perf_counter()
        match message:
            case Chunks():
                for chunk in message.chunks:
                    run = self._runs[chunk.request_id]
                    run.token_s += [now_s] * len(chunk.token_ids)
                    run.token_ids += chunk.token_ids
                    run.num_cached = max(run.num_cached, chunk.num_cached_tokens)
                    if chunk.finish_reason is not None:
                        run.error = chunk.error
                        run.is_over.set()
            case Refused():
                run = self._runs[message.request_id]
                run.error = message.message
                run.is_over.set()
            case Ping():
                channel.send(Pong())
            case _:
                pass

    def _closed(self, _channel: Channel, reason: str) -> None:
        for run in self._runs.values():
            if not run.is_over.is_set():
                run.error = reason
                run.is_over.set()


async def through(prefill: Group, decode: Group, prompt: Sequence[int], max_tokens: int, salt: str) -> Run:
    """As a router serves a request by a pair: all of it to one group, its prompt alone to the other."""
    transfer_id = secrets.token_hex(16)
    _, there = prefill.send(prompt, 0, salt=salt, transfer_id=transfer_id)
    run = await decode.finish(prompt, max_tokens, salt=salt, source=prefill.source(transfer_id))
    async with asyncio.timeout(_TIMEOUT_S):
        await there.is_over.wait()
    return run


async def serve(plan: GroupPlan) -> None:
    """This process as a group."""
    os.sched_setaffinity(0, plan.cores)
    schedule = replace(ScheduleConfig(), max_prefill_chunk=plan.max_prefill_chunk)
    start = GroupStart(
        config=GroupConfig(
            model=ModelConfig(path=plan.model, dtype="bfloat16"),
            cache=CacheConfig(num_blocks=plan.num_blocks),
            schedule=schedule,
            parallel=ParallelConfig(device="cpu", threads_per_rank=len(plan.cores)),
            transfer=TransferConfig(transport=plan.transport),
        ),
        group_id=GroupId(plan.name),
        epoch=1,
        role=Role.UNIFIED,
        secret=bytes.fromhex(plan.secret),
        on_loopback=True,
    )
    host = LeaderHost(start, host="127.0.0.1")
    await asyncio.to_thread(host.load)
    print(json.dumps(await host.listen()), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await host.stop("the benchmark is over")


def main() -> None:
    values = json.loads(sys.stdin.readline())
    asyncio.run(serve(GroupPlan(**{**values, "cores": tuple(values["cores"])})))


if __name__ == "__main__":
    main()
