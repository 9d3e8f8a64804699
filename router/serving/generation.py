"""A checked request on the groups: admission, dispatch, tokens to text, the answer.

Life of a request: admitted -> one GenerateRequest per prompt goes to the dispatcher -> chunks come back and
become deltas of choices -> the answer is written, whole or as events. Leaving early, at any point, closes the
dispatcher's generators, which cancels on the groups; the admission slot is freed in the same breath. Every
admitted request is counted once, by its reason: stop, length, aborted, error. Where the time to the first
token went is counted too, and remembered for the last requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from router.admission import Admission, AdmittedRequest
from router.api.errors import internal_error, invalid
from router.dispatch.attempts import CRASHED, DISTRUSTED, STOPPED
from router.dispatch.interface import Dispatcher, Unavailable
from router.serving.answers import DONE, AnswerWriter, ChoiceAnswer, PromptAnswer, Usage, best_answers
from router.serving.choice import Choice, Delta, prompt_text
from router.serving.explain import prompt_id
from router.serving.merge import merged
from router.serving.work import Work
from router.settings import RouterSettings
from router.telemetry import table
from router.telemetry.metrics import RouterMetrics
from router.telemetry.waterfall import FirstToken, waterfall
from router.text.tokenizer import TextTokenizer
from workers.types import INVALID_GRAMMAR, FinishReason, GenerateRequest, TokenChunk

# Codes with which a group refuses a request as the client's mistake.
_CLIENT_CODES = frozenset(
    {
        "invalid_value",
        "context_length_exceeded",
        "kv_pool_too_small",
        "beam_width_too_large",
        "unsupported_parameter",
        INVALID_GRAMMAR,
    }
)
# Codes of what another group, or the same one later, could do.
_LATER_CODES = CRASHED | {STOPPED, DISTRUSTED, "router_stopping"}
_OVERLOAD_CODES = frozenset({"queue_full"})

_MAX_REMEMBERED = 1024  # waterfalls, as many as decisions of placement

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """What a request has got so far."""

    choices: list[Choice]
    prompts: list[PromptAnswer]
    usage: Usage
    unfinished: int
    ttft_s: float | None = None
    reasons: set[str] = field(default_factory=set)


class Generation:
    """Runs requests and writes their answers. Used from one event loop."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        tokenizer: TextTokenizer,
        admission: Admission,
        metrics: RouterMetrics,
        settings: RouterSettings,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic seconds."""
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._admission = admission
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._first_tokens: OrderedDict[str, FirstToken] = OrderedDict()  # by id of the request
        self._is_counting_goodput = not (settings.goodput_ttft_s is settings.goodput_tpot_s is None)
        if self._is_counting_goodput:
            metrics.count(table.GOODPUT, 0)

    def first_token(self, request_id: str) -> FirstToken | None:
        """How one of the last requests came to its first token; None when it is not remembered."""
        return self._first_tokens.get(request_id)

    async def complete(self, work: Work) -> bytes:
        """The whole answer as JSON. Raises ApiError; cancelling it cancels the request on its group."""
        progress = self._progress(work)
        answers = [ChoiceAnswer(choice.prompt_index) for choice in progress.choices]
        async with aclosing(self._events(work, progress)) as events:
            async for choice, delta in events:
                answers[choice.index].add(delta)
        if work.num_best is not None:
            answers = best_answers(answers, work.num_choices, work.num_best)
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
        return _Progress(
            choices,
            prompts,
            Usage(work.num_prompt_tokens, truncation=work.truncation),
            unfinished=len(choices),
        )

    async def _events(self, work: Work, progress: _Progress) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """(choice, what a chunk adds to it), until every choice has ended. Counts the request."""
        outcome = "aborted"
        with self._admission.admit(work.caller.tenant, work.num_prompt_tokens) as place:
            self._metrics.count(table.PROMPT_TOKENS, work.num_prompt_tokens)
            self._metrics.prompt_tokens.observe(work.num_prompt_tokens)
            try:
                async with aclosing(merged(self._dispatcher, self._requests(work))) as chunks:
                    async for prompt_index, chunk in chunks:
                        choice = progress.choices[prompt_index * work.num_choices + chunk.choice]
                        if choice.is_finished:  # by a stop string, which its engine does not know of
                            continue
                        self._check_chunk(work, chunk)
                        yield choice, self._take(work, progress, place, choice, chunk)
                        if not progress.unfinished:
                            break
                if progress.unfinished:
                    raise internal_error("incomplete_answer", "The worker group ended the answer too early.")
                outcome = "length" if "length" in progress.reasons else "stop"
            except Unavailable as error:
                outcome = "error"
                raise self._admission.unavailable(
                    "no_group", error.message, code=error.code, retry_after_s=error.retry_after_s
                ) from None
            except Exception:
                outcome = "error"
                raise
            finally:
                self._count(work, progress, outcome)

    def _take(
        self, work: Work, progress: _Progress, place: AdmittedRequest, choice: Choice, chunk: TokenChunk
    ) -> Delta:
        """One chunk of a choice into the progress."""
        now = self._clock()
        if chunk.token_ids:
            if choice.num_tokens:
                self._metrics.itl_s.observe((now - choice.last_token_at) / len(chunk.token_ids))
            else:
                choice.first_token_at = now
            choice.last_token_at = now
        if chunk.choice == 0:
            # Later choices of a prompt find it cached by the first: no news of the prompt.
            progress.usage.cached_tokens += chunk.num_cached_tokens
            if chunk.prompt_logprobs is not None:
                progress.prompts[choice.prompt_index].logprobs = chunk.prompt_logprobs
        before = choice.num_tokens
        delta = choice.add(chunk)
        progress.usage.completion_tokens += choice.num_tokens - before
        if place.is_queued:
            place.first_token()
            self._began(work, progress, choice, chunk, now)
        if choice.is_finished:
            progress.unfinished -= 1
            progress.reasons.add(delta.finish_reason or "")
            if choice.tpot_s is not None and work.beam is None:  # whose tokens come all at once
                self._metrics.tpot_s.observe(choice.tpot_s)
        return delta

    def _began(
        self, work: Work, progress: _Progress, choice: Choice, chunk: TokenChunk, received_at: float
    ) -> None:
        """The first token of a request is text."""
        now = self._clock()
        progress.ttft_s = now - work.arrived_at
        stages = waterfall(
            progress.ttft_s,
            prepare=work.prepare,
            decision=self._dispatcher.explain(prompt_id(work.id, choice.prompt_index)),
            times=chunk.times,
            detokenize_s=now - received_at,
        )
        self._metrics.ttft_s.observe(progress.ttft_s)
        self._metrics.queue_s.observe(stages["queue"])
        self._metrics.observe_stages(stages)
        self._first_tokens[work.id] = FirstToken(progress.ttft_s, stages)
        if len(self._first_tokens) > _MAX_REMEMBERED:
            self._first_tokens.popitem(last=False)

    def _count(self, work: Work, progress: _Progress, outcome: str) -> None:
        """Once for every admitted request."""
        usage = progress.usage
        seconds = self._clock() - work.arrived_at
        self._metrics.count(table.REQUESTS, 1, outcome)
        self._metrics.count(table.GENERATION_TOKENS, usage.completion_tokens)
        self._metrics.count(table.CACHED_TOKENS, usage.cached_tokens)
        self._metrics.e2e_s.observe(seconds)
        self._metrics.output_tokens.observe(usage.completion_tokens)
        if self._is_counting_goodput and outcome in ("stop", "length") and self._is_good(progress):
            self._metrics.count(table.GOODPUT)
        _log.info(
            "request %s: %s after %.3f s, %d prompt tokens (%d cached), %d generated",
            *(work.id, outcome, seconds, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
        )

    def _is_good(self, progress: _Progress) -> bool:
        """Whether a complete answer came within the limits of goodput."""
        most_ttft_s, most_tpot_s = self._settings.goodput_ttft_s, self._settings.goodput_tpot_s
        is_prompt = most_ttft_s is None or (progress.ttft_s is not None and progress.ttft_s <= most_ttft_s)
        gaps = [choice.tpot_s for choice in progress.choices if choice.tpot_s is not None]
        return is_prompt and (most_tpot_s is None or all(gap <= most_tpot_s for gap in gaps))

    def _requests(self, work: Work) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                request_id=prompt_id(work.id, index),
                prompt_token_ids=prompt,
                sampling=work.sampling[index],
                num_choices=work.num_choices,
                beam=work.beam,
                cache_salt=work.cache_salt,
                grammar=work.asked_grammar.grammar if work.asked_grammar is not None else None,
            )
            for index, prompt in enumerate(work.prompts)
        ]

    def _check_chunk(self, work: Work, chunk: TokenChunk) -> None:
        """Raises ApiError for a chunk that says the request failed."""
        if chunk.finish_reason not in (FinishReason.ERROR, FinishReason.CANCELLED):
            return
        code = chunk.error_code or "engine_error"
        message = chunk.error or "The worker group ended this request."
        if code in _CLIENT_CODES:
            asked = work.asked_grammar if code == INVALID_GRAMMAR else None
            raise invalid(message, code=code, param=asked.param if asked is not None else None)
        if code in _OVERLOAD_CODES:
            raise self._admission.unavailable("group_busy", message)
        if code in _LATER_CODES:
            raise self._admission.unavailable("no_group", message, code=code)
        raise internal_error(code, message)
