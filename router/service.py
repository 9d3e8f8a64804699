"""A request's way through the router: admission, dispatch, tokens to text, the answer.

Life of a request: checked and tokenized (`router.prepare`) -> admitted -> one GenerateRequest per prompt
goes to the dispatcher -> chunks come back and become deltas of choices -> the answer is written, whole or as
events. Leaving early, at any point, closes the dispatcher's generators, which cancels on the groups; the
admission slot is freed in the same breath. Every admitted request is counted once, by its reason: stop,
length, aborted, error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from router import metrics as metric
from router.admission import Admission, AdmittedRequest
from router.answers import DONE, AnswerWriter, ChoiceAnswer, PromptAnswer, Usage
from router.auth import Caller
from router.choice import Choice, Delta, prompt_text
from router.dispatch import Dispatcher, Unavailable
from router.errors import ApiError, internal_error, invalid, model_not_found, overloaded
from router.explain import explanation, prompt_id
from router.merge import merged
from router.metrics import RouterMetrics
from router.prepare import Arrival, Preparer
from router.protocol import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from router.sampling_defaults import with_defaults
from router.settings import RouterSettings
from router.text_workers import TextBusy
from router.tokenizer import TextTokenizer
from router.work import ModelLimits, Work
from workers.types import FinishReason, GenerateRequest, GroupInfo, TokenChunk

# Codes with which a group refuses a request as the client's mistake.
_CLIENT_CODES = frozenset({"invalid_value", "context_length_exceeded", "kv_pool_too_small"})
# Codes of what another group, or the same one later, could do.
_LATER_CODES = frozenset(
    {"engine_dead", "group_failed", "group_draining", "not_connected", "submit_timeout", "draining"}
)
_OVERLOAD_CODES = frozenset({"queue_full", "server_is_overloaded"})
_RETRY_S = 1.0

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """What a request has got so far."""

    choices: list[Choice]
    prompts: list[PromptAnswer]
    usage: Usage
    unfinished: int
    reasons: set[str] = field(default_factory=set)


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

    # What the service knows.

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken, by at least one group, and every group known has given a real token
        in its present epoch."""
        groups = self._dispatcher.groups()
        return bool(groups) and all(group.is_ready for group in groups) and not self.admission.is_draining

    @property
    def is_healthy(self) -> bool:
        """Whether a request could be answered: at least one group is ready."""
        return any(group.is_ready for group in self._dispatcher.groups())

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
            raise self._unavailable("No worker group is up yet.", "no_ready_group", _RETRY_S)
        return ModelLimits(
            vocab_size=min(info.vocab_size for info in models),
            max_model_len=min(info.max_model_len for info in models),
            model_hash=models[0].model_hash,
        )

    def _models(self) -> list[GroupInfo]:
        """What groups say of their model. One that is listed but not connected (just started, or dying) has
        said nothing yet."""
        return [group.info for group in self._dispatcher.groups() if group.info is not None]

    def load(self) -> dict[str, Any]:
        """Body of /load."""
        groups = self._dispatcher.groups()
        return {
            "requests_inflight": self.admission.num_inflight,
            "requests_queued": self.admission.num_queued,
            "groups": [
                {
                    "group": group.group_id,
                    "ready": group.is_ready,
                    "running": group.stats.num_running,
                    "waiting": group.stats.num_waiting,
                    "free_blocks": group.stats.free_blocks,
                    "cached_blocks": group.stats.cached_blocks,
                    "active_blocks": group.stats.active_blocks,
                }
                for group in groups
            ],
        }

    def explain(self, answer_id: str) -> dict[str, Any]:
        """Body of /explain. Raises ApiError 404 when this replica does not know the request."""
        return {"replica": self._settings.replica, **explanation(self._dispatcher, answer_id)}

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
        """Checked and tokenized. Raises ApiError."""
        arrival = self._arrival(request_id, caller)
        self._check_model(body.get("model"))
        request = parse_chat(with_defaults(body, self._sampling_defaults), self._settings)
        self.admission.check(caller.tenant)
        return await self._tokenizing(self._preparer.chat(request, arrival, self.limits()))

    async def prepare_completion(self, body: Mapping[str, Any], request_id: str, caller: Caller) -> Work:
        """Checked and tokenized. Raises ApiError."""
        arrival = self._arrival(request_id, caller)
        self._check_model(body.get("model"))
        request = parse_completion(with_defaults(body, self._sampling_defaults), self._settings)
        self.admission.check(caller.tenant)
        return await self._tokenizing(self._preparer.completion(request, arrival, self.limits()))

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
        """The whole answer as JSON. Raises ApiError; cancelling it cancels the request on its group."""
        progress = self._progress(work)
        answers = [ChoiceAnswer(choice.prompt_index) for choice in progress.choices]
        async with aclosing(self._events(work, progress)) as events:
            async for choice, delta in events:
                answers[choice.index].add(delta)
        writer = self._writer(work)
        if work.num_logprobs is None:
            return writer.whole(progress.prompts, answers, progress.usage)
        # Twenty alternatives for each of 100,000 tokens take seconds: not on the event loop.
        return await asyncio.to_thread(writer.whole, progress.prompts, answers, progress.usage)

    async def stream(self, work: Work) -> AsyncGenerator[bytes, None]:
        """Server-sent events, `[DONE]` at the end. Raises ApiError, before the first event where possible.

        Closing it cancels the request on its group.
        """
        writer = self._writer(work)
        progress = self._progress(work)
        unbegun = dict.fromkeys(range(len(work.prompts)), b"")  # prompt -> events that wait for its first one
        async with aclosing(self._events(work, progress)) as events:
            async for choice, delta in events:
                event = writer.tokens(choice.index, delta, progress.usage)
                if choice.is_finished:
                    event += writer.end(choice.index, delta, progress.usage)
                index = choice.prompt_index
                if index in unbegun:
                    prompt = progress.prompts[index]
                    if work.echo and work.num_logprobs is not None and prompt.logprobs is None:
                        # Another choice has found the prompt cached: its scores are still to come.
                        unbegun[index] += event
                        continue
                    choices = progress.choices[index * work.num_choices : (index + 1) * work.num_choices]
                    begins = [writer.begin(other.index, index, prompt, progress.usage) for other in choices]
                    event = b"".join((*begins, unbegun.pop(index), event))
                if event:
                    yield event
        yield writer.usage(progress.usage) + DONE if work.include_usage else DONE

    # Inside.

    def _arrival(self, request_id: str, caller: Caller) -> Arrival:
        return Arrival(
            id=request_id, caller=caller, arrived_at=self._clock(), created=int(self._wall_clock())
        )

    async def _tokenizing(self, work: Awaitable[Result]) -> Result:
        try:
            return await work
        except TextBusy:
            raise self._unavailable(
                "Too many prompts are waiting to be tokenized.", "server_is_overloaded", _RETRY_S
            ) from None

    def _check_model(self, name: object) -> None:
        if name is None or name == self._settings.model_name:
            return
        if not isinstance(name, str):
            raise invalid("model must be a string.", param="model", code="invalid_type")
        raise model_not_found(name)

    def _writer(self, work: Work) -> AnswerWriter:
        return AnswerWriter(self._tokenizer, work, self._settings.model_name)

    def _progress(self, work: Work) -> _Progress:
        count = work.num_choices
        choices = [
            Choice(self._tokenizer, work, index // count, index) for index in range(len(work.prompts) * count)
        ]
        prompts = [PromptAnswer() for _ in work.prompts]
        if work.echo:
            for index, prompt in enumerate(work.prompts):
                echo = prompt_text(
                    self._tokenizer,
                    prompt,
                    is_all=work.sampling[index].max_tokens == 0,
                    skip_special=work.skip_special_tokens,
                )
                prompts[index].echo = echo
                for choice in choices[index * count : (index + 1) * count]:
                    choice.start_at(len(echo.text))
        return _Progress(choices, prompts, Usage(work.num_prompt_tokens), unfinished=len(choices))

    async def _events(self, work: Work, progress: _Progress) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """(choice, what a chunk adds to it), until every choice has ended. Counts the request."""
        outcome = "aborted"
        with self.admission.admit(work.caller.tenant, work.num_prompt_tokens) as place:
            self.metrics.count(metric.PROMPT_TOKENS, work.num_prompt_tokens)
            try:
                async with aclosing(merged(self._dispatcher, self._requests(work))) as chunks:
                    async for prompt_index, chunk in chunks:
                        choice = progress.choices[prompt_index * work.num_choices + chunk.choice]
                        if choice.is_finished:  # by a stop string, which its engine does not know of
                            continue
                        self._check_chunk(chunk)
                        yield choice, self._take(work, progress, place, choice, chunk)
                        if not progress.unfinished:
                            break
                if progress.unfinished:
                    raise internal_error("incomplete_answer", "The worker group ended the answer too early.")
                outcome = "length" if "length" in progress.reasons else "stop"
            except Unavailable as error:
                outcome = "error"
                raise self._unavailable(error.message, error.code, error.retry_after_s) from None
            except Exception:
                outcome = "error"
                raise
            finally:
                self._count(work, progress.usage, outcome)

    def _take(
        self, work: Work, progress: _Progress, place: AdmittedRequest, choice: Choice, chunk: TokenChunk
    ) -> Delta:
        """One chunk of a choice into the progress."""
        now = self._clock()
        if place.is_queued:
            place.first_token()
            self.metrics.ttft_s.observe(now - work.arrived_at)
        if chunk.token_ids:
            if choice.num_tokens:
                self.metrics.itl_s.observe((now - choice.last_token_at) / len(chunk.token_ids))
            choice.last_token_at = now
        if chunk.choice == 0:
            # Later choices of a prompt find it cached by the first: no news of the prompt.
            progress.usage.cached_tokens += chunk.num_cached_tokens
            if chunk.prompt_logprobs is not None:
                progress.prompts[choice.prompt_index].logprobs = chunk.prompt_logprobs
        before = choice.num_tokens
        delta = choice.add(chunk)
        progress.usage.completion_tokens += choice.num_tokens - before
        if choice.is_finished:
            progress.unfinished -= 1
            progress.reasons.add(delta.finish_reason or "")
        return delta

    def _count(self, work: Work, usage: Usage, outcome: str) -> None:
        """Once for every admitted request."""
        seconds = self._clock() - work.arrived_at
        self.metrics.count(metric.REQUESTS, 1, outcome)
        self.metrics.count(metric.GENERATION_TOKENS, usage.completion_tokens)
        self.metrics.count(metric.CACHED_TOKENS, usage.cached_tokens)
        self.metrics.e2e_s.observe(seconds)
        _log.info(
            "request %s: %s after %.3f s, %d prompt tokens (%d cached), %d generated",
            *(work.id, outcome, seconds, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        )

    def _requests(self, work: Work) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                request_id=prompt_id(work.id, index),
                prompt_token_ids=prompt,
                sampling=work.sampling[index],
                num_choices=work.num_choices,
                cache_salt=work.cache_salt,
            )
            for index, prompt in enumerate(work.prompts)
        ]

    def _check_chunk(self, chunk: TokenChunk) -> None:
        """Raises ApiError for a chunk that says the request failed."""
        if chunk.finish_reason not in (FinishReason.ERROR, FinishReason.CANCELLED):
            return
        code = chunk.error_code or "engine_error"
        message = chunk.error or "The worker group ended this request."
        if code in _CLIENT_CODES:
            raise invalid(message, code=code)
        if code in _OVERLOAD_CODES:
            raise self._unavailable(message, "server_is_overloaded", _RETRY_S)
        if code in _LATER_CODES:
            raise self._unavailable(message, code, _RETRY_S)
        raise internal_error(code, message)

    def _unavailable(self, message: str, code: str, retry_after_s: float) -> ApiError:
        return overloaded(message, retry_after_s=self.admission.spread(retry_after_s), code=code)
