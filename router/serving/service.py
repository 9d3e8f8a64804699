"""What the HTTP API answers: what the router knows of itself, its groups and its model, and requests, which
are checked and tokenized (`prepare`) and then run (`generation`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from router.admission import Admission
from router.api.auth import Caller
from router.api.errors import invalid, model_not_found
from router.api.protocol import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from router.api.sampling_defaults import with_defaults
from router.dispatch.interface import Dispatcher, GroupState, Unavailable
from router.serving.explain import explanation, request_of
from router.serving.generation import Generation
from router.serving.prepare import Arrival, Preparer
from router.serving.work import ModelLimits, Work
from router.settings import RouterSettings
from router.telemetry.metrics import RouterMetrics
from router.text.text_workers import TextBusy
from router.text.tokenizer import TextTokenizer
from workers.types import GroupInfo

Result = TypeVar("Result")


class Service:
    """The HTTP API without HTTP: checked bodies in, bodies and events out. Used from one event loop."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        tokenizer: TextTokenizer,
        preparer: Preparer,
        admission: Admission,
        metrics: RouterMetrics,
        settings: RouterSettings,
        sampling_defaults: Mapping[str, Any],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`sampling_defaults`: fields of requests that do not say. `clock` is monotonic seconds,
        `wall_clock` Unix seconds."""
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._preparer = preparer
        self._settings = settings
        self._sampling_defaults = sampling_defaults
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = int(wall_clock())
        self.admission = admission
        self.metrics = metrics
        self._generation = Generation(
            dispatcher=dispatcher,
            tokenizer=tokenizer,
            admission=admission,
            metrics=metrics,
            settings=settings,
            clock=clock,
        )

    # What the service knows.

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken, by at least one group that answers, and every group known has given
        a real token in its present epoch. One that was told to leave does not count. Where requests may wait
        for the first group, none need be there."""
        groups = [group for group in self._dispatcher.groups() if not group.is_leaving]
        return (
            (any(group.can_answer for group in groups) or self._waits_for_groups)
            and all(group.is_ready for group in groups)
            and not self.admission.is_draining
        )

    @property
    def is_healthy(self) -> bool:
        """Whether a request could be answered: at least one group that does is ready, or one may come."""
        return self._waits_for_groups or any(
            group.is_ready and group.can_answer for group in self._dispatcher.groups()
        )

    @property
    def _waits_for_groups(self) -> bool:
        return self._settings.group_wait_s > 0

    def start_draining(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self.admission.is_draining = True

    def close(self) -> None:
        """Ends the threads that tokenize, once they have nothing to do."""
        self._preparer.close()

    def limits(self) -> ModelLimits:
        """Limits of the model. Raises ApiError 503 while no group is known.

        While groups differ (a rolling update), what every one of them can serve.
        """
        models = self._models()
        if not models:
            raise self.admission.unavailable("no_group", "No worker group is up yet.", code="no_ready_group")
        return ModelLimits(
            vocab_size=min(info.vocab_size for info in models),
            max_model_len=min(info.max_model_len for info in models),
            model_hash=models[0].model_hash,
        )

    def _models(self) -> list[GroupInfo]:
        """What groups that answer say of their model. One that is listed but not connected (just started, or
        dying) has said nothing yet."""
        groups = self._dispatcher.groups()
        return [group.info for group in groups if group.info is not None and group.can_answer]

    def load(self) -> dict[str, Any]:
        """Body of /load."""
        groups = self._dispatcher.groups()
        return {
            "requests_inflight": self.admission.num_inflight,
            "requests_queued": self.admission.num_queued,
            "groups": [
                {
                    "group": group.group_id,
                    "role": group.role.value,
                    "ready": group.is_ready,
                    "running": group.stats.num_running,
                    "waiting": group.stats.num_waiting,
                    "free_blocks": group.stats.free_blocks,
                    "cached_blocks": group.stats.cached_blocks,
                    "active_blocks": group.stats.active_blocks,
                    **_exchange(group),
                    "usage": _usage(group),
                }
                for group in groups
            ],
            "pairs": [pair._asdict() for pair in self._dispatcher.pairs()],
        }

    def explain(self, answer_id: str) -> dict[str, Any]:
        """Body of /explain. Raises ApiError 404 when this replica does not know the request."""
        first = self._generation.first_token(request_of(answer_id))
        return {"replica": self._settings.replica, **explanation(self._dispatcher, answer_id, first)}

    def models(self) -> dict[str, Any]:
        """Body of /v1/models."""
        return {"object": "list", "data": [self.model(self._settings.model_name)]}

    def model(self, name: str) -> dict[str, Any]:
        """One model. Raises ApiError 404 for another name."""
        self._check_model(name)
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "tandem",
            "root": self._settings.model_name,
            "parent": None,
            "max_model_len": min((info.max_model_len for info in self._models()), default=None),
        }

    # Requests.

    async def prepare_chat(self, body: Mapping[str, Any], request_id: str, caller: Caller) -> Work:
        """Checked and tokenized. Waits for a group as `_room` says. Raises ApiError."""
        arrived_at = self._clock()
        self._check_model(body.get("model"))
        request = parse_chat(with_defaults(body, self._sampling_defaults), self._settings)
        arrival = await self._arrival(request_id, caller, arrived_at)
        return await self._tokenizing(self._preparer.chat(request, arrival))

    async def prepare_completion(self, body: Mapping[str, Any], request_id: str, caller: Caller) -> Work:
        """Checked and tokenized. Waits for a group as `_room` says. Raises ApiError."""
        arrived_at = self._clock()
        self._check_model(body.get("model"))
        request = parse_completion(with_defaults(body, self._sampling_defaults), self._settings)
        arrival = await self._arrival(request_id, caller, arrived_at)
        return await self._tokenizing(self._preparer.completion(request, arrival))

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Body of /tokenize. Raises ApiError."""
        self._check_model(body.get("model"))
        request = parse_tokenize(body, self._settings)
        limits = self.limits()
        ids = await self._tokenizing(self._preparer.tokens(request, limits))
        strings = [self._tokenizer.text_of(id) for id in ids] if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    async def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Body of /detokenize. Raises ApiError."""
        self._check_model(body.get("model"))
        request = parse_detokenize(body, self._settings)
        return {"prompt": await self._tokenizing(self._preparer.text(request, self.limits()))}

    async def complete(self, work: Work) -> bytes:
        """See `Generation.complete`."""
        return await self._generation.complete(work)

    def stream(self, work: Work) -> AsyncGenerator[bytes, None]:
        """See `Generation.stream`."""
        return self._generation.stream(work)

    # Inside.

    async def _room(self, caller: Caller) -> ModelLimits:
        """Limits of the model, for a request that would be admitted now. When no group has said what it is,
        it waits as a queued request for one that may come: bounded as those are. Raises ApiError."""
        if self._models():
            self.admission.check(caller.tenant)
            return self.limits()
        with self.admission.admit(caller.tenant, 0):
            try:
                await self._dispatcher.available()
            except Unavailable as error:
                raise self.admission.unavailable(
                    "no_group", error.message, code=error.code, retry_after_s=error.retry_after_s
                ) from None
        return self.limits()

    async def _arrival(self, request_id: str, caller: Caller, arrived_at: float) -> Arrival:
        """Of a request whose fields have been checked. Raises ApiError when there is no room for it."""
        limits = await self._room(caller)
        return Arrival(
            id=request_id,
            caller=caller,
            arrived_at=arrived_at,
            checked_at=self._clock(),
            created=int(self._wall_clock()),
            limits=limits,
        )

    async def _tokenizing(self, work: Awaitable[Result]) -> Result:
        try:
            return await work
        except TextBusy:
            raise self.admission.unavailable(
                "text_busy", "Too many prompts are waiting to be tokenized."
            ) from None

    def _check_model(self, name: object) -> None:
        if name is None or name == self._settings.model_name:
            return
        if not isinstance(name, str):
            raise invalid("model must be a string.", param="model", code="invalid_type")
        raise model_not_found(name)


def _exchange(group: GroupState) -> dict[str, Any]:
    """What a group has to do with the KV blocks of others, as it tells every router."""
    info, stats = group.info, group.stats
    block_bytes = info.kv_bytes_per_block if info is not None else 0
    return {
        "exchanges_kv": info is not None and info.exchanges_kv,
        "exchange_problem": info.exchange_problem if info is not None else "",
        "leases": stats.kv_leases,
        "transferring_blocks": stats.kv_transferring_blocks,
        "reads": [
            {
                "source": reads.group_id,
                "transport": reads.transport,
                "open": reads.num_open,
                "done": reads.num_done,
                "failed": reads.num_failed,
                "bytes": reads.num_blocks * block_bytes,
                "seconds": reads.seconds,
            }
            for reads in stats.kv_sources
        ],
    }


def _usage(group: GroupState) -> dict[str, Any]:
    """What the group's recent steps were held up by, and how near they came to the machine's ceilings."""
    usage = group.report.usage
    return {
        "bound": usage.bound.value,
        "busy": usage.busy_share,
        "compute": usage.compute_share,
        "bandwidth": usage.bandwidth_share,
    }
