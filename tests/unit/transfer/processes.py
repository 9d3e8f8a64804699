"""Owners and readers in processes of their own.

One process with everything imported (`python -m tests.unit.transfer.processes`) forks the others, before it
has any thread, so that each costs milliseconds. Every child opens a control port for the test.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # found by the network calls of a child that may not read our files
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.unit.transfer.layouts import layout
from tests.unit.transfer.ranks import Rank, compiled, no_compiler, pairs, pull, settings
from workers.transfer.layout import KVLayout
from workers.transfer.link import Endpoint
from workers.transfer.puller import source_group

TIMEOUT_S = 30.0


def layout_of(block_kib: int) -> KVLayout:
    """A block of that size, a multiple of 64 KiB, all of it in one head."""
    return layout(num_kv_heads=1, num_layers=block_kib // 64, block_size=2, head_dim=4096)


def own(num_blocks: int, block_kib: int, is_compiled: bool, control: socket.socket) -> None:
    """Block b is filled with the byte b + 1. Commands: `bump BLOCK` gives a block to somebody else, `peers`
    counts connections."""
    load = compiled if is_compiled else no_compiler
    rank = Rank(layout_of(block_kib), 0, num_blocks=num_blocks, load=load)
    assert rank.generations is not None
    for block in range(num_blocks):
        rank.pool[block].view(torch.uint8).fill_(block + 1)
    with _answering(control, rank.agent.endpoint.port) as lines:
        for line in lines:
            command, *arguments = line.split()
            if command == "bump":
                rank.generations[int(arguments[0])] += 1
            lines.write(f"{rank.agent._server.num_peers}\n")
            lines.flush()
    rank.agent.close()


def read(port: int, transport: str, user: int, control: socket.socket) -> None:
    """Reads 8 blocks of 64 KiB, again and again; tells the first outcome."""
    if user:
        os.setgid(user)
        os.setuid(user)
    of = layout_of(64)
    rank = Rank(of, 0, num_blocks=8, using=settings(transports=(transport,)))
    source = source_group(of, [Endpoint("127.0.0.1", port)])
    blocks = pairs([(block, block) for block in range(8)])
    with _answering(control, 0) as lines:
        lines.write(f"{pull(rank.agent, source, blocks) or 'read'}\n")
        lines.flush()
        while pull(rank.agent, source, blocks) is None:
            pass


def _answering(control: socket.socket, port: int) -> Any:
    print(json.dumps([os.getpid(), control.getsockname()[1], port]), flush=True)
    connection, _ = control.accept()
    return connection.makefile("rw")


def serve() -> None:
    """Forks a child for every line."""
    torch.set_num_threads(1)
    compiled()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are gone as soon as they end
    for line in sys.stdin:
        kind, *arguments = line.split()
        if os.fork():
            continue
        control = socket.create_server(("127.0.0.1", 0))
        if kind == "own":
            num_blocks, block_kib, is_compiled = map(int, arguments)
            own(num_blocks, block_kib, bool(is_compiled), control)
        else:
            read(int(arguments[0]), arguments[1], int(arguments[2]), control)
        os._exit(0)


class Child:
    """A forked process, seen from a test."""

    def __init__(self, pid: int, control_port: int, port: int) -> None:
        self.pid = pid
        self.endpoint = Endpoint("127.0.0.1", port)
        self._control = socket.create_connection(("127.0.0.1", control_port), timeout=TIMEOUT_S)
        self._lines = self._control.makefile("rw")

    def line(self) -> str:
        """The next one it says."""
        return self._lines.readline()

    def ask(self, line: str) -> int:
        """Connections of the owner, after the command."""
        self._lines.write(line + "\n")
        self._lines.flush()
        return int(self.line())

    def stop(self) -> None:
        """SIGSTOP; returns when all threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT_S
        tasks = list(Path(f"/proc/{self.pid}/task").iterdir())
        while any((task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for task in tasks):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        deadline = time.monotonic() + TIMEOUT_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.001)
        self._control.close()


class Processes:
    """Starts children."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.transfer.processes"],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def owner(self, num_blocks: int, block_kib: int, *, is_compiled: bool = True) -> Child:
        return self._start(f"own {num_blocks} {block_kib} {int(is_compiled)}")

    def reader(self, port: int, transport: str, user: int = 0) -> Child:
        return self._start(f"read {port} {transport} {user}")

    def end_children(self) -> None:
        for child in self._children:
            child.kill()
        self._children = []

    def close(self) -> None:
        self.end_children()
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT_S)

    def _start(self, command: str) -> Child:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        child = Child(*json.loads(self._process.stdout.readline()))
        self._children.append(child)
        return child


if __name__ == "__main__":
    serve()
