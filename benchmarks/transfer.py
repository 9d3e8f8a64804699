"""Speed of moving KV blocks between two processes, beside memcpy and a bare loopback socket in the same run.

    python -m benchmarks.transfer [--blocks 1,32,1024] [--runs N] [--cores apart|one|any] [--json]

Blocks are those of SmolLM2 in bf16: 16 tokens, 368,640 bytes, at random places of pools in huge pages. Every
run measures every subject in turn, one after the other:

    memcpy    the same number of blocks inside this process, one thread
    loopback  as many bytes over a bare TCP socket: one message asks for them, sendall is the answer
    awake     the same, and who asks takes what has come over and over and never sleeps
    others    the transports, until the last byte is checked; `order`: the fastest, by the agent's thread

Memcpy and the transports move the same blocks. The bare socket moves one run of as many bytes from a random
place to a random place: at fixed places (as it was once) its bytes come from the caches of both ends and
theirs from memory. It compares nothing, neither generations nor checksums. With `--cores apart` each process
has half of the processors to itself, as groups have; with `one` both share the first one, and nobody has to
be woken on another; with `any` the scheduler decides, and may change its mind from run to run.

GB/s are medians over the runs, ratios are medians of the ratios of one run. The last line of output is JSON:
{"rows": [{"blocks", "subject", "gb_per_s", "of_memcpy", "of_loopback", "samples": GB/s}, ...], "machine"}.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from threading import Thread, Timer

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cluster.figures.machine import facts
from workers.kernels.memory import huge_bytes
from workers.transfer.agent import Agent
from workers.transfer.choice import TRANSPORTS, choose
from workers.transfer.layout import KVLayout, reads
from workers.transfer.link import Endpoint, PeerLink, limit_waits
from workers.transfer.pool_bytes import PoolBytes, find_library
from workers.transfer.puller import Order, SourceGroup, TransferSettings
from workers.transfer.transport import Reader, TransferFailed
from workers.types import BlockRead

LAYOUT = KVLayout(
    model_hash="SmolLM2-135M",
    code="benchmark",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    block_size=16,
    num_kv_heads=3,
    num_layers=30,
    head_dim=64,
    tensor_parallel=1,
)
BLOCK_BYTES = LAYOUT.block_bytes(0)
TIMEOUT_S = 30.0
STOP_S = 5.0
_RUN = struct.Struct("<QQ")
RUN_BYTES = 64 * BLOCK_BYTES  # few blocks are read several times in a run, so that one takes milliseconds


def make_pool(num_blocks: int) -> torch.Tensor:
    """(num_blocks, block bytes) of huge pages, every page touched."""
    return huge_bytes(num_blocks * BLOCK_BYTES).view(num_blocks, BLOCK_BYTES).random_()


def make_agent(pool: torch.Tensor, settings: TransferSettings) -> Agent:
    return Agent(
        pool=pool,
        layout=LAYOUT,
        rank=0,
        generations=np.zeros(len(pool), dtype=np.int64),
        host="127.0.0.1",
        settings=settings,
    )


def make_settings(secret: bytes) -> TransferSettings:
    return TransferSettings(secret=secret, machine="this", transports=TRANSPORTS, timeout_s=TIMEOUT_S)


def take_cores(cores: str, *, is_first: bool) -> None:
    """This process runs on the first or the last half of the processors, or on the first one, or on any."""
    allowed = sorted(os.sched_getaffinity(0))
    half = len(allowed) // 2
    if cores == "one":
        os.sched_setaffinity(0, allowed[:1])
    elif cores == "apart" and half:
        os.sched_setaffinity(0, allowed[:half] if is_first else allowed[half:])


def own_blocks(num_blocks: int) -> None:
    """The other process: serves until its standard input ends."""
    secret = bytes.fromhex(sys.stdin.readline())
    pool = make_pool(num_blocks)
    agent = make_agent(pool, make_settings(secret))
    raw = socket.create_server(("127.0.0.1", 0))
    senders = [Thread(target=send_raw, args=(raw, pool.view(-1).numpy().data), daemon=True) for _ in range(2)]
    for sender in senders:
        sender.start()
    print(json.dumps([agent.endpoint.port, raw.getsockname()[1]]), flush=True)
    sys.stdin.read()
    agent.close()
    for sender in senders:  # a thread that is ended by the end of the interpreter may abort the process
        sender.join(STOP_S)


def send_raw(listener: socket.socket, data: memoryview) -> None:
    """Sends the bytes that every message of 16 bytes asks for: from where, and how many."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while wanted := connection.recv(_RUN.size, socket.MSG_WAITALL):
        start, num_bytes = _RUN.unpack(wanted)
        connection.sendall(data[start : start + num_bytes])


class Bench:
    """Both ends: an owner in another process, and every subject of this one."""

    def __init__(self, owner: subprocess.Popen[str], num_blocks: int) -> None:
        assert owner.stdin is not None and owner.stdout is not None
        secret = secrets.token_bytes(32)
        owner.stdin.write(secret.hex() + "\n")
        owner.stdin.flush()
        dog = Timer(TIMEOUT_S, owner.kill)
        dog.start()
        line = owner.stdout.readline()
        dog.cancel()
        if not line:
            raise RuntimeError("the owner's process did not start; it said why above")
        port, raw_port = json.loads(line)
        self._num_blocks = num_blocks
        self._source = SourceGroup(LAYOUT, (Endpoint("127.0.0.1", port),))
        self._pool, self._copied = make_pool(num_blocks), make_pool(num_blocks)
        self._bytes = PoolBytes(self._pool, find_library())
        self._raw, self._awake = (
            socket.create_connection(("127.0.0.1", raw_port), timeout=TIMEOUT_S) for _ in range(2)
        )
        limit_waits(self._awake, TIMEOUT_S, TIMEOUT_S)
        self._pieces = reads(LAYOUT, 0, LAYOUT)
        settings = make_settings(secret)
        self._agent = make_agent(self._pool, settings)
        self._readers: list[Reader] = []
        self.subjects: dict[str, Callable[[Sequence[BlockRead]], None]] = {
            "memcpy": self._memcpy,
            "loopback": partial(self._loopback, self._raw, 0),
            "awake": partial(self._loopback, self._awake, socket.MSG_DONTWAIT),
        }
        for name in TRANSPORTS:
            link = PeerLink(self._source.endpoints[0], secret, timeout_s=TIMEOUT_S)
            reader = choose(link, self._bytes, settings.machine, (name,), timeout_s=TIMEOUT_S).reader
            self._readers.append(reader)
            self.subjects[name] = partial(self._read, reader)
        self.subjects["order"] = self._order

    def seconds(self, subject: str, num_blocks: int) -> float:
        """Median of one pass over that many blocks at new random places."""
        found = []
        for _ in range(max(1, RUN_BYTES // (num_blocks * BLOCK_BYTES))):
            there, here = (random.sample(range(self._num_blocks), num_blocks) for _ in range(2))
            blocks = [BlockRead(source, 0, own) for source, own in zip(there, here, strict=True)]
            started = time.perf_counter()
            self.subjects[subject](blocks)
            found.append(time.perf_counter() - started)
        return statistics.median(found)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._agent.close()
        self._raw.close()
        self._awake.close()

    def _read(self, reader: Reader, blocks: Sequence[BlockRead]) -> None:
        reader.read(blocks, self._pieces)

    def _memcpy(self, blocks: Sequence[BlockRead]) -> None:
        source, own = self._copied.data_ptr(), self._bytes.address
        for block in blocks:
            ctypes.memmove(own + block.own * BLOCK_BYTES, source + block.source * BLOCK_BYTES, BLOCK_BYTES)

    def _loopback(self, raw: socket.socket, flags: int, blocks: Sequence[BlockRead]) -> None:
        num_bytes, last = len(blocks) * BLOCK_BYTES, self._num_blocks - len(blocks)
        there, here = (min(place, last) * BLOCK_BYTES for place in (blocks[0].source, blocks[0].own))
        target = self._pool.view(-1).numpy().data[here : here + num_bytes]
        raw.sendall(_RUN.pack(there, num_bytes))
        deadline_s = time.monotonic() + TIMEOUT_S
        while target.nbytes:
            with contextlib.suppress(BlockingIOError):
                if (num_got := raw.recv_into(target, 0, flags)) == 0:
                    raise EOFError("the owner of the bare socket has closed it")
                target = target[num_got:]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the bare socket gave too little in {TIMEOUT_S} s")

    def _order(self, blocks: Sequence[BlockRead]) -> None:
        ends: Queue[TransferFailed | None] = Queue()
        self._agent.pull(self._source, Order(1, tuple(blocks), lambda _, error: ends.put(error)))
        error = ends.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error


def measure(bench: Bench, sizes: Sequence[int], runs: int) -> list[dict[str, object]]:
    """Rows of all sizes and subjects."""
    rows: list[dict[str, object]] = []
    for size in sizes:
        found: dict[str, list[float]] = {name: [] for name in bench.subjects}
        for name in bench.subjects:
            bench.seconds(name, size)  # warm
        for _ in range(runs):
            for name in bench.subjects:
                found[name].append(size * BLOCK_BYTES / bench.seconds(name, size) / 1e9)
        for name, speeds in found.items():
            row: dict[str, object] = {"blocks": size, "subject": name}
            row["gb_per_s"] = round(statistics.median(speeds), 2)
            for roof in ("memcpy", "loopback"):
                ratios = [speed / limit for speed, limit in zip(speeds, found[roof], strict=True)]
                row[f"of_{roof}"] = round(statistics.median(ratios), 2)
            row["samples"] = speeds
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer")
    parser.add_argument("--blocks", default="1,32,1024", help="blocks read at once")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--cores", choices=("apart", "one", "any"), default="apart", help="of both processes")
    parser.add_argument("--json", action="store_true", help="no table on stdout, only the JSON line")
    parser.add_argument("--own", type=int, help=argparse.SUPPRESS)  # the other process: blocks of its pool
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.own is not None:
        take_cores(options.cores, is_first=False)
        own_blocks(options.own)
        return
    sizes = [int(size) for size in options.blocks.split(",")]
    num_blocks = max(256, *sizes)
    own = (f"--own={num_blocks}", f"--cores={options.cores}")
    command = [sys.executable, "-m", "benchmarks.transfer", *own]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        take_cores(options.cores, is_first=True)  # the other one would inherit it
        try:
            bench = Bench(owner, num_blocks)
            rows = measure(bench, sizes, options.runs)
            bench.close()
        finally:
            assert owner.stdin is not None
            owner.stdin.close()
    if owner.returncode:
        raise SystemExit(f"the other process ended with {owner.returncode}")
    if not options.json:
        table = Table(title=f"KV blocks of {BLOCK_BYTES:,} bytes between two processes")
        headings = ("blocks", "subject", "gb_per_s", "of_memcpy", "of_loopback")
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "subject" else "right")
        for row in rows:
            table.add_row(*(str(row[heading]) for heading in headings))
        Console().print(table)
    print(json.dumps({"rows": rows, "machine": facts()}))


if __name__ == "__main__":
    main()
