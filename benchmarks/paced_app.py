"""A Tandem application whose worker group computes nothing: real router, proxy and sockets, paced tokens.

`benchmarks.paced_app:build` stands where `cluster.app:build` does. The group answers every request with a
token each `PERIOD_S`, all requests in the same step, as an engine does whose step takes that long. It costs
next to nothing, so what the router and the proxy need for a token can be measured at a pace of our choice.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.models import embedded
from router.deployment import Router, RouterStart
from router.routing.policy import PolicyConfig
from router.settings import RouterSettings
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.server import StreamServer
from workers.data_plane.submit import SubmitClient
from workers.directory.groups import GroupEntry, GroupPhase
from workers.directory.lease import DirectoryLease
from workers.engine.loop import StepOutput
from workers.group_start import group_id_of
from workers.secret import application_secret
from workers.types import (
    FinishReason,
    GenerateRequest,
    GroupId,
    GroupInfo,
    GroupStats,
    RequestId,
    Role,
    TokenChunk,
)

PERIOD_S = 0.02
POOL = "unified"
_VOCAB_SIZE = 49152
_MODEL_HASH = "00"
_TEXT_IDS = range(1000, 9000)  # ordinary words in the embedded model's vocabulary


class PacedEngine:
    """Implements `workers.data_plane.server_terms.EngineInput`. Belongs to one asyncio loop, its server's."""

    def __init__(self, server: StreamServer) -> None:
        self._server = server
        self._tokens_left: dict[RequestId, int] = {}
        self._num_steps = 0

    def submit(self, request: GenerateRequest) -> None:
        """Takes every request, of one choice."""
        self._tokens_left[request.request_id] = request.sampling.max_tokens

    def abort(self, request_id: RequestId) -> None:
        """Forgets it."""
        self._tokens_left.pop(request_id, None)

    async def run(self) -> None:
        """A step every period, late ones at once, until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + PERIOD_S, loop.time() - PERIOD_S)
            await asyncio.sleep(next_s - loop.time())
            self._step()

    def _step(self) -> None:
        chunks = []
        self._num_steps += 1
        token_id = _TEXT_IDS[self._num_steps % len(_TEXT_IDS)]
        for request_id, left in list(self._tokens_left.items()):
            self._tokens_left[request_id] = left - 1
            if left == 1:
                del self._tokens_left[request_id]
            reason = FinishReason.LENGTH if left == 1 else None
            chunks.append(
                TokenChunk(request_id=request_id, choice=0, token_ids=(token_id,), finish_reason=reason)
            )
        stats = GroupStats(
            num_running=len(self._tokens_left), num_steps=self._num_steps, step_seconds=PERIOD_S
        )
        if chunks:
            self._server.on_output(StepOutput(chunks=tuple(chunks), events=(), stats=stats))


class PacedGroup:
    """Serve replica: front and rank 0 in one process."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        replica_id = context.replica_id.unique_id
        secret = await asyncio.to_thread(application_secret, context.app_name)
        group_id = group_id_of(POOL, replica_id)
        server = StreamServer(info=_info(group_id), secret=secret)
        engine = PacedEngine(server)
        address = await server.start(engine, "127.0.0.1")
        self._steps = asyncio.create_task(engine.run())
        self._client = SubmitClient(ClientIdentity(client_id="front", secret=secret, subscribes=False))
        await self._client.connect(*address)
        entry = GroupEntry(
            group_id=group_id,
            replica_id=replica_id,
            pool=POOL,
            role=Role.UNIFIED,
            epoch=1,
            phase=GroupPhase.READY,
            address=address,
        )
        self._lease = DirectoryLease(context.app_name, entry)
        self._lease.start()

    async def submit(
        self, client_id: str, request: GenerateRequest, ranked_groups: tuple[str, ...]
    ) -> GroupId:
        """As `workers.group.WorkerGroup.submit`."""
        await self._client.submit(client_id, request)
        return self._lease.entry.group_id


def _info(group_id: GroupId) -> GroupInfo:
    return GroupInfo(
        group_id=group_id,
        epoch=1,
        role=Role.UNIFIED,
        model="paced",
        model_hash=_MODEL_HASH,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        tensor_parallel=1,
        vocab_size=_VOCAB_SIZE,
        max_model_len=8192,
        block_size=16,
        num_blocks=4096,
        kv_bytes_per_block=1,
    )


def build(_: dict[str, Any]) -> Application:
    """The Serve application; takes no arguments."""
    folder = embedded.ensure(print)
    group = serve.deployment(
        name=POOL,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        request_router_config={"request_router_class": "router.request_router:RankedRequestRouter"},
    )(PacedGroup).bind()
    start = RouterStart(
        http=RouterSettings(model_name="paced"),
        policy=PolicyConfig(),
        tokenizer_folder=str(folder),
        model_hash=_MODEL_HASH,
        update_timeout_s=60.0,
    )
    router = serve.deployment(name="router", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
    return router(Router).bind(start, {POOL: group})
