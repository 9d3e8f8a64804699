"""Streams an engine's tokens to router replicas. Runs on an asyncio loop beside the engine's thread.

Per step of the engine: one wake-up of this loop, and for every client one write that holds the step's block
events, the load (at most every `stats_period_s`), and one frame with all tokens of that client's requests.

Whose request: SUBMIT names the client whose connection gets the tokens. The request ends with its last
choice, with ABORT, or with that connection: whatever is not wanted any more is aborted in the engine.
A client that does not read, stays silent or sends nonsense loses its connection; the engine never waits.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.data_plane.block_log import BlockLog
from workers.data_plane.channel import Channel, SilenceCheck
from workers.data_plane.lease_server import LeaseMessage, LeaseServer
from workers.data_plane.live_requests import LiveRequests
from workers.data_plane.server_terms import EngineInput, ServerLimits
from workers.data_plane.wire import (
    NONCE_BYTES,
    Abort,
    Accepted,
    Challenge,
    Chunks,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Redirect,
    Refused,
    Resync,
    Stats,
    Submit,
    Welcome,
    WireError,
    encode,
    hello_mac,
    welcome_mac,
)
from workers.engine.loop import StepOutput
from workers.engine.request import MAX_CHOICES
from workers.report import GroupReport
from workers.tasks import start_task
from workers.types import (
    BlockEvent,
    GroupInfo,
    GroupStats,
    KVSource,
    RequestId,
    TokenChunk,
    error_chunk,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Client:
    """One connection, before and after its greeting."""

    channel: Channel
    nonce: bytes
    connected_s: float
    client_id: str | None = None  # None until greeted
    subscribes: bool = False


class StreamServer:
    """Serves one epoch of a group. All methods but `on_output` belong to the asyncio loop."""

    def __init__(
        self,
        *,
        info: GroupInfo,
        secret: bytes,
        limits: ServerLimits | None = None,
        on_redirect: Callable[[RequestId, KVSource | None], None] | None = None,
        lease_server: LeaseServer | None = None,
    ) -> None:
        """`on_redirect` tells the engine to read a request's blocks from elsewhere, or nowhere; without it
        the group reads no blocks of others. `lease_server`: for those who read its own."""
        self._info = info
        self._secret = secret
        self._on_redirect = on_redirect
        self._lease_server = lease_server or LeaseServer()
        self._limits = limits or ServerLimits()
        self._engine: EngineInput | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._stats_timer: asyncio.TimerHandle | None = None
        self._outputs: deque[StepOutput] = deque()  # filled by the engine's thread
        self._is_woken = False
        self._is_stopped = False
        self._connections: dict[Channel, _Client] = {}
        self._clients: dict[str, _Client] = {}  # greeted
        self._requests = LiveRequests(self._limits.max_remembered_aborts)
        self._blocks = BlockLog(info.group_id, self._limits.snapshot_part_blocks)
        self._stats = GroupStats()
        self._report: GroupReport | None = None
        self._stats_sent_s = float("-inf")
        self._goodbye: Goodbye | None = None  # the group has ended, or ends

    # ---- life cycle

    async def start(self, engine: EngineInput, host: str) -> tuple[str, int]:
        """Listens on a free port; returns the address."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(self._new_channel, host, 0, backlog=256)
        self._heartbeat = start_task(self._beat(), f"the heartbeat of {self._info.group_id}")
        self._wake()  # outputs from before the start
        return host, int(self._server.sockets[0].getsockname()[1])

    async def stop(self, reason: str, *, is_planned: bool = False) -> None:
        """Aborts every request, says goodbye and closes. May be called twice."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self._goodbye = self._goodbye or Goodbye(reason=reason, is_planned=is_planned)
        server.close()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        if self._stats_timer is not None:
            self._stats_timer.cancel()
        self._dismiss_all(self._goodbye)
        self._is_stopped = True

    @property
    def num_requests(self) -> int:
        """Requests whose tokens somebody waits for."""
        return len(self._requests)

    @property
    def client_ids(self) -> list[str]:
        """Clients that have greeted and are connected."""
        return list(self._clients)

    # ---- from the engine

    def on_output(self, output: StepOutput) -> None:
        """Takes what a step made. Called by the engine's thread, also before the start; never blocks."""
        if not self._is_stopped:
            self._outputs.append(output)
            self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is None or self._is_woken:
            return
        self._is_woken = True
        try:
            loop.call_soon_threadsafe(self._flush)
        except RuntimeError:  # the loop has been closed under us: nobody is left to read the output
            self._is_stopped = True

    def _flush(self) -> None:
        """Writes everything that the engine has reported since the last time."""
        if self._is_stopped:
            self._outputs.clear()
            return
        self._is_woken = False  # before taking, so that an output that comes now wakes us again
        events: list[BlockEvent] = []
        chunks: dict[str, list[TokenChunk]] = {}
        assert self._loop is not None
        now_s = self._loop.time()
        while self._outputs:
            output = self._outputs.popleft()
            events += output.events
            self._stats = output.stats
            self._report = output.report or self._report
            if output.failure is not None:
                self._goodbye = self._goodbye or Goodbye(reason=output.failure)
            for chunk in output.chunks:
                if (reader := self._requests.pass_on(chunk, now_s)) is not None:
                    chunks.setdefault(reader, []).append(chunk)
        self._stats = replace(
            self._stats,
            first_tokens_total=self._requests.first_tokens_total,
            first_token_seconds_total=self._requests.first_token_seconds_total,
        )
        self._write(self._blocks.take(events), chunks)
        if self._goodbye is not None:
            self._dismiss_all(self._goodbye)

    def _write(self, news: bytes, chunks: dict[str, list[TokenChunk]]) -> None:
        """One write per client that has something to read."""
        stats = self._due_stats()
        for client in list(self._clients.values()):
            assert client.client_id is not None
            parts = [news] if news and client.subscribes else []
            parts.append(stats)
            if own := chunks.get(client.client_id):
                parts.append(self._encode_chunks(own))
            if data := b"".join(parts):
                client.channel.write(data)

    def _due_stats(self) -> bytes:
        """A STATS frame, or nothing and a timer when the last one is too young."""
        assert self._loop is not None
        now = self._loop.time()
        wait_s = self._stats_sent_s + self._limits.stats_period_s - now
        if wait_s <= 0:
            self._stats_sent_s = now
            return encode(Stats(stats=self._stats))
        if self._stats_timer is None:
            self._stats_timer = self._loop.call_later(wait_s, self._send_late_stats)
        return b""

    def _send_late_stats(self) -> None:
        self._stats_timer = None
        self._stats_sent_s = float("-inf")
        self._write(b"", {})

    def _encode_chunks(self, chunks: list[TokenChunk]) -> bytes:
        """One frame, unless that would be too large: then one per chunk, and an error for a hopeless one."""
        try:
            return encode(Chunks(chunks=tuple(chunks)))
        except WireError as error:
            if len(chunks) > 1:
                return b"".join([self._encode_chunks([chunk]) for chunk in chunks])
            message = f"the answer does not fit into a frame: {error}"
        request_id, choice = chunks[0].request_id, chunks[0].choice
        failed = [
            error_chunk(request_id, open_choice, "response_too_large", message)
            for open_choice in sorted({choice} | self._requests.unfinished(request_id))
        ]
        self._end(request_id)
        return encode(Chunks(chunks=tuple(failed)))

    # ---- from clients

    def _new_channel(self) -> Channel:
        return Channel(
            on_open=self._opened,
            on_message=self._message,
            on_closed=self._closed,
            max_outgoing_bytes=self._limits.max_outgoing_bytes,
        )

    def _opened(self, channel: Channel) -> None:
        if len(self._connections) >= self._limits.max_clients:
            channel.drop(f"more than {self._limits.max_clients} connections")
            return
        assert self._loop is not None
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._connections[channel] = _Client(channel, nonce, connected_s=self._loop.time())
        channel.send(Challenge(nonce=nonce))

    def _message(self, channel: Channel, message: Message) -> None:
        client = self._connections.get(channel)
        if client is None:
            return
        if client.client_id is None:
            self._greet(client, message)
            return
        match message:
            case Submit():
                channel.send(self._submit(message))
            case Abort():
                self._abort(client, message.request_id)
            case Redirect():
                self._redirect(client, message)
            case Resync():
                channel.write(self._blocks.snapshot())
            case Pong():
                pass
            case _ if isinstance(message, LeaseMessage):
                self._lease_server.handle(channel, message)
            case _:
                raise WireError(f"a client does not send {type(message).__name__}")

    def _greet(self, client: _Client, message: Message) -> None:
        if not isinstance(message, Hello):
            raise WireError(f"{type(message).__name__} before HELLO")
        expected = hello_mac(self._secret, client.nonce, message.nonce, message.client_id)
        if not hmac.compare_digest(expected, message.mac):
            raise WireError(f"client {message.client_id!r} does not know the application's secret")
        if self._goodbye is not None:
            client.channel.send(self._goodbye)
            client.channel.close(self._goodbye.reason)
            return
        if (older := self._clients.get(message.client_id)) is not None:
            older.channel.drop("the client has connected again")
            self._leave(older)
        client.client_id = message.client_id
        client.subscribes = message.subscribes
        self._clients[message.client_id] = client
        client.channel.trust()
        mac = welcome_mac(self._secret, client.nonce, message.nonce, message.client_id)
        stats = Stats(stats=self._stats, report=self._report)
        client.channel.send(Welcome(info=self._info, mac=mac), stats)
        if client.subscribes:
            client.channel.write(self._blocks.snapshot())

    def _submit(self, submit: Submit) -> Accepted | Refused:
        """Hands a request to the engine, for a client that is there to read its tokens."""
        assert self._engine is not None
        request = submit.request
        refusal: tuple[str, str] | None = None
        if self._goodbye is not None:
            refusal = "group_failed", self._goodbye.reason
        elif submit.client_id not in self._clients:
            refusal = "client_not_connected", f"client {submit.client_id!r} is not there to read the tokens"
        elif request.request_id in self._requests:
            refusal = "duplicate_request", f"request {request.request_id!r} is running already"
        elif self._requests.take_abort(request.request_id):
            refusal = "aborted", f"request {request.request_id!r} was aborted before it came"
        elif not 1 <= request.num_choices <= MAX_CHOICES:
            refusal = "invalid_value", f"num_choices is {request.num_choices}, allowed: 1 to {MAX_CHOICES}"
        if refusal is not None:
            return Refused(request_id=request.request_id, code=refusal[0], message=refusal[1])
        arrived_s = None if request.begun or self._loop is None else self._loop.time()
        self._requests.add(request.request_id, request.choices(), submit.client_id, arrived_s)
        self._engine.submit(request)
        return Accepted(request_id=request.request_id)

    def _abort(self, client: _Client, request_id: RequestId) -> None:
        reader = self._requests.reader(request_id)
        if reader is None:
            self._requests.remember_abort(request_id)
        elif reader == client.client_id:  # not somebody else's
            self._end(request_id)

    def _redirect(self, client: _Client, message: Redirect) -> None:
        """The request may have ended by now, and is nobody else's to redirect."""
        if self._on_redirect is not None and self._requests.reader(message.request_id) == client.client_id:
            self._on_redirect(message.request_id, message.source)

    def _closed(self, channel: Channel, reason: str) -> None:
        client = self._connections.pop(channel, None)
        if client is None:
            return
        _log.info("client %s of %s left: %s", client.client_id, self._info.group_id, reason)
        self._leave(client)

    def _leave(self, client: _Client) -> None:
        """Nobody reads this client's tokens any more, nor our blocks for it."""
        self._lease_server.leave(client.channel)
        if client.client_id is None or self._clients.get(client.client_id) is not client:
            return
        del self._clients[client.client_id]
        for request_id in self._requests.of(client.client_id):
            self._end(request_id)

    # ---- shared

    def _end(self, request_id: RequestId) -> None:
        """Aborts in the engine; chunks that still come are dropped."""
        assert self._engine is not None
        self._requests.remove(request_id)
        self._engine.abort(request_id)

    async def _beat(self) -> None:
        """Heartbeats, and the end of clients that do not answer them."""
        assert self._loop is not None
        silence = SilenceCheck(self._limits.heartbeat_s)
        while True:
            await asyncio.sleep(self._limits.heartbeat_s)
            now_s = self._loop.time()
            may_judge = silence.may_judge(now_s)
            self._lease_server.beat()
            beat = encode(Stats(stats=self._stats, report=self._report)) + encode(Ping())
            for client in list(self._connections.values()):
                silent_s = now_s - client.channel.heard_s
                if client.client_id is not None:
                    client.channel.write(beat)
                elif now_s - client.connected_s > self._limits.greeting_timeout_s and may_judge:
                    client.channel.drop("no HELLO in time")
                if silent_s > self._limits.dead_after_s and may_judge:
                    client.channel.drop(f"silent for {silent_s:.1f} s")

    def _dismiss_all(self, goodbye: Goodbye) -> None:
        for client in list(self._connections.values()):
            self._leave(client)
            if client.client_id is not None:
                client.channel.send(goodbye)
            client.channel.close(goodbye.reason)
