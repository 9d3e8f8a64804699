"""CPU that a streamed chunk costs on both ends: `python -m tests.unit.data_plane.measure --streams 16`.

The group's end runs in a process of its own: the real server under an engine thread that makes one token a
step for every stream (its own CPU is measured and left out). The router's end is the real dispatcher with one
reader a stream. Prints microseconds of CPU per chunk and chunks per second, as one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from router.dispatch.dispatcher import SocketDispatcher
from tests.unit.data_plane.fakes import SECRET, info, request
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.server import StreamServer
from workers.data_plane.submit import SubmitClient
from workers.engine.loop import StepOutput
from workers.types import (
    FinishReason,
    GenerateRequest,
    GroupAddress,
    GroupId,
    GroupStats,
    RequestId,
    Role,
    TokenChunk,
)


class Engine:
    """Steps at a fixed pace while all streams are there; canaries are answered at once."""

    def __init__(self, num_streams: int, num_steps: int, step_s: float) -> None:
        self.server: StreamServer | None = None
        self.engine_cpu_s = self.total_cpu_s = self.wall_s = 0.0
        self.done = threading.Event()
        self._num_streams, self._num_steps, self._step_s = num_streams, num_steps, step_s
        self._names: list[RequestId] = []

    def submit(self, request: GenerateRequest) -> None:
        if request.request_id.startswith("canary"):
            self._emit([request.request_id], is_last=True)
            return
        self._names.append(request.request_id)
        if len(self._names) == self._num_streams:
            threading.Thread(target=self._run, daemon=True).start()

    def abort(self, request_id: RequestId) -> None:
        """Nothing to free."""

    def _run(self) -> None:
        time.sleep(0.3)  # the router's end begins to measure
        wall, total, own = time.perf_counter(), time.process_time(), time.thread_time()
        for step in range(self._num_steps):
            self._emit(self._names, is_last=step == self._num_steps - 1)
            if self._step_s:
                time.sleep(max(wall + (step + 1) * self._step_s - time.perf_counter(), 0.0))
            elif step % 8 == 7:
                time.sleep(0.0005)  # let the event loop have the interpreter
        time.sleep(0.3)
        self.engine_cpu_s = time.thread_time() - own
        self.total_cpu_s = time.process_time() - total
        self.wall_s = time.perf_counter() - wall - 0.3
        self.done.set()

    def _emit(self, names: Sequence[RequestId], *, is_last: bool) -> None:
        assert self.server is not None
        reason = FinishReason.LENGTH if is_last else None
        chunks = tuple(
            TokenChunk(request_id=name, choice=0, token_ids=(1234,), finish_reason=reason) for name in names
        )
        self.server.on_output(StepOutput(chunks=chunks, events=(), stats=GroupStats(num_running=len(names))))


def serve(pipe: Connection, num_streams: int, num_steps: int, step_s: float) -> None:
    """The group's process."""

    async def main() -> None:
        engine = Engine(num_streams, num_steps, step_s)
        engine.server = StreamServer(info=info(), secret=SECRET)
        pipe.send(await engine.server.start(engine, "127.0.0.1"))
        await asyncio.to_thread(engine.done.wait, 300.0)
        pipe.send((engine.total_cpu_s - engine.engine_cpu_s, engine.engine_cpu_s, engine.wall_s))
        await engine.server.stop("measured")

    asyncio.run(main())


async def read(host: str, port: int, num_streams: int, num_steps: int) -> tuple[float, int]:
    """CPU seconds of the router's process while tokens came, and how many pieces the readers got."""
    group = GroupId("g1")
    address = GroupAddress(group_id=group, replica_id="r", host=host, port=port, role=Role.UNIFIED, epoch=1)
    front = SubmitClient(ClientIdentity(client_id="front", secret=SECRET, subscribes=False))
    await front.connect(host, port)

    async def source() -> Sequence[GroupAddress]:
        return [address]

    async def send(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
        await front.submit(client_id, wanted)
        return order[0]

    router = SocketDispatcher(secret=SECRET, source=source, send=send)
    await router.start()
    while not any(state.is_ready for state in router.groups()):  # noqa: ASYNC110 (a state of another process)
        await asyncio.sleep(0.01)

    async def reader(number: int) -> int:
        count = 0
        async for _ in router.generate(request(f"r{number}", max_tokens=num_steps)):
            count += 1
        return count

    tasks = [asyncio.create_task(reader(number)) for number in range(num_streams)]
    await asyncio.sleep(0.2)
    start = time.process_time()
    pieces = sum(await asyncio.gather(*tasks))
    cpu_s = time.process_time() - start
    await router.stop()
    front.close()
    return cpu_s, pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0, help="0: as fast as it goes")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, options.streams, options.steps, options.step_ms / 1000.0)
    group = context.Process(target=serve, args=arguments, daemon=True)
    group.start()
    host, port = ours.recv()
    router_cpu_s, pieces = asyncio.run(read(host, port, options.streams, options.steps))
    group_cpu_s, engine_cpu_s, wall_s = ours.recv()
    group.join(10.0)
    chunks = options.streams * options.steps
    print(
        json.dumps(
            {
                "streams": options.streams,
                "step_ms": options.step_ms,
                "chunks": chunks,
                "pieces_read": pieces,
                "group_us_per_chunk": round(group_cpu_s / chunks * 1e6, 1),
                "engine_thread_us_per_chunk": round(engine_cpu_s / chunks * 1e6, 1),
                "router_us_per_chunk": round(router_cpu_s / chunks * 1e6, 1),
                "chunks_per_s": round(chunks / wall_s),
            }
        )
    )


if __name__ == "__main__":
    main()
