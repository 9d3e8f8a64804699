"""From a checked HTTP request to work for the groups: token ids, budgets, seeds.

Everything that can be wrong with a request and needs the tokenizer or the model's limits is refused here,
before any group hears of it. Engines check again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from router.api.auth import Caller
from router.api.errors import ApiError, context_length_exceeded, internal_error, invalid
from router.api.messages import check_messages
from router.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from router.api.structured import asked_grammar
from router.serving.token_ids import check_ids_of_fields, checked_ids
from router.serving.truncation import Truncation, cut, turn_ends, without_turns
from router.serving.work import Endpoint, ModelLimits, Work
from router.settings import RouterSettings
from router.telemetry.waterfall import PrepareTimes
from router.text.text_workers import TextTimeout, TextWorkers
from router.text.tokenizer import TextTokenizer
from workers.types import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_LONG_CHARS = 100_000  # of a text that takes long to tokenize, up to seconds for each MB
_MAX_FRAME_CHARS = 256  # that a template writes around a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What the service knows of a request beside its body."""

    id: str
    caller: Caller
    arrived_at: float
    checked_at: float  # its fields were, and whether there is room; of the same clock
    created: int
    limits: ModelLimits


class _Tokenized(NamedTuple):
    ids: list[int]
    render_s: float  # of the time it took, for the chat template


class Preparer:
    """Tokenizes and checks. Raises ApiError for a mistake of the client, TextBusy when there is too much to
    tokenize. `draw_seed` gives a random int64 for requests without a seed."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer,
        workers: TextWorkers,
        settings: RouterSettings,
        draw_seed: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic seconds, as of arrivals."""
        self._tokenizer = tokenizer
        self._workers = workers
        self._settings = settings
        self._draw_seed = draw_seed
        self._clock = clock

    def close(self) -> None:
        """Ends the threads."""
        self._workers.close()

    async def chat(self, request: ChatRequest, arrival: Arrival) -> Work:
        """One prompt, from the messages."""
        limits = arrival.limits
        budget = request.max_completion_tokens or request.max_tokens
        room = limits.max_model_len - (budget or 1)
        messages = check_messages(request.messages)
        prompt, render_s = await self._messages_ids(messages, request, limits)
        num_whole, num_dropped = len(prompt), 0
        if request.truncation == "auto" and num_whole > room:
            ends = turn_ends(messages)
            first, last = 0, len(ends) - 1  # the least that has to be dropped is the first one that fits
            while first <= last:
                middle = (first + last) // 2
                shorter = without_turns(messages, ends[middle])
                tried = await self._messages_ids(shorter, request, limits)
                render_s += tried.render_s
                if len(tried.ids) <= room:
                    prompt, num_dropped, last = tried.ids, len(messages) - len(shorter), middle - 1
                else:
                    first = middle + 1
        prompt = _cut(prompt, request, room)
        budgets = [_budget(len(prompt), budget, limits.max_model_len - len(prompt), limits, "messages")]
        work = self._work(request, arrival, [prompt], budgets, render_s)
        if not request.is_cut:
            return work
        found = Truncation(dropped_messages=num_dropped, dropped_tokens=num_whole - len(prompt))
        return replace(work, truncation=found)

    async def completion(self, request: CompletionRequest, arrival: Arrival) -> Work:
        """One prompt or several."""
        limits, prompts = arrival.limits, []
        for prompt in self._split_prompts(request.prompt, limits):
            if isinstance(prompt, str):
                special = request.add_special_tokens
                prompts.append(await self._text_ids(prompt, limits, special, any_length=request.is_cut))
            else:
                prompts.append(prompt)
        asked = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        num_whole = sum(map(len, prompts))
        prompts = [_cut(prompt, request, limits.max_model_len - asked) for prompt in prompts]
        budgets = [
            _budget(len(prompt), request.max_tokens, DEFAULT_COMPLETION_TOKENS, limits, "prompt")
            for prompt in prompts
        ]
        work = self._work(request, arrival, prompts, budgets)
        if request.is_cut:
            work = replace(work, truncation=Truncation(dropped_tokens=num_whole - work.num_prompt_tokens))
        if not request.echo:
            return work
        scored = request.logprobs
        if scored is None and not all(budgets):
            scored = 0  # without new tokens, scores are all that an engine can do
        sampling = tuple(replace(params, num_prompt_logprobs=scored) for params in work.sampling)
        return replace(work, echo=True, sampling=sampling)

    async def tokens(self, request: TokenizeRequest, limits: ModelLimits) -> list[int]:
        """Token ids for /tokenize."""
        if request.messages is not None:
            tokenized = await self._chat_ids(
                check_messages(request.messages),
                limits,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=False,
                add_special_tokens=bool(request.add_special_tokens),
            )
            return tokenized.ids
        assert request.prompt is not None
        return await self._text_ids(request.prompt, limits, request.add_special_tokens is not False)

    async def text(self, request: DetokenizeRequest, limits: ModelLimits) -> str:
        """The text of /detokenize."""
        ids = checked_ids(request.tokens, limits.vocab_size, "tokens")
        try:
            return await self._workers.run(
                lambda: self._tokenizer.decode(ids), self._settings.tokenize_timeout_s
            )
        except TextTimeout as error:
            raise _too_complex(error, "tokens") from None

    def _split_prompts(self, prompt: str | list[Any], limits: ModelLimits) -> list[str | list[int]]:
        """The prompts of a request, each a text or checked token ids."""
        if isinstance(prompt, str):
            entries: list[Any] = [prompt]
        elif not prompt:
            raise invalid("prompt is empty.", param="prompt")
        elif isinstance(prompt[0], str | list):
            entries = prompt
        else:
            return [checked_ids(prompt, limits.vocab_size, "prompt")]
        if len(entries) > self._settings.max_prompts:
            raise invalid(
                f"prompt: at most {self._settings.max_prompts} prompts in one request, got {len(entries)}.",
                param="prompt",
            )
        kind = type(entries[0])
        prompts: list[str | list[int]] = []
        for i, entry in enumerate(entries):
            path = "prompt" if len(entries) == 1 else f"prompt[{i}]"
            if type(entry) is not kind:
                raise invalid(
                    "prompt must be all texts or all lists of token ids.", param=path, code="invalid_type"
                )
            if not entry:
                raise invalid(f"{path} is empty.", param=path)
            prompts.append(entry if isinstance(entry, str) else checked_ids(entry, limits.vocab_size, path))
        return prompts

    async def _text_ids(
        self, text: str, limits: ModelLimits, add_special_tokens: bool, *, any_length: bool = False
    ) -> list[int]:
        if not any_length:
            self._check_chars(len(text), limits, "prompt")
        tokenizer = self._tokenizer
        try:
            ids = await self._workers.run(
                lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens),
                self._settings.tokenize_timeout_s,
                is_long=len(text) > _LONG_CHARS,
            )
        except TextTimeout as error:
            raise _too_complex(error, "prompt") from None
        if not ids:
            raise invalid("prompt is empty: it has no tokens.", param="prompt")
        return ids

    async def _messages_ids(
        self, messages: Sequence[Mapping[str, str]], request: ChatRequest, limits: ModelLimits
    ) -> _Tokenized:
        return await self._chat_ids(
            messages,
            limits,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            any_length=request.is_cut,
        )

    async def _chat_ids(
        self,
        messages: Sequence[Mapping[str, str]],
        limits: ModelLimits,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool,
        any_length: bool = False,
    ) -> _Tokenized:
        """`messages` are checked; with `any_length` they need not fit the context."""
        num_chars = sum(len(message["content"]) for message in messages)
        if not any_length:
            self._check_chars(num_chars, limits, "messages")
        settings, tokenizer = self._settings, self._tokenizer
        rendered: list[float] = []  # how long it took, once it has been done

        def encode() -> list[int]:
            began = self._clock()
            text = tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                # A prompt that fits is never near this: tokens are longer than that on no real text.
                max_chars=max(settings.max_template_chars_per_token, tokenizer.max_token_chars)
                * limits.max_model_len
                + (num_chars + _MAX_FRAME_CHARS * len(messages) if any_length else 0),
                timeout_s=settings.render_timeout_s,
            )
            rendered.append(self._clock() - began)
            return tokenizer.encode_rendered(text, add_special_tokens=add_special_tokens)

        try:
            ids = await self._workers.run(
                encode,
                settings.render_timeout_s,
                extra_s=lambda: settings.tokenize_timeout_s if rendered else 0.0,
                is_long=num_chars > _LONG_CHARS,
            )
        except TextTimeout as error:
            if rendered:
                raise _too_complex(error, "messages") from None
            raise internal_error("template_error", f"The chat template took {error}.") from None
        if not ids:
            raise invalid("The messages have no tokens.", param="messages")
        return _Tokenized(ids, rendered[0])

    def _times(self, arrival: Arrival, render_s: float) -> PrepareTimes:
        """Of a request that is tokenized now. Waiting for a thread counts as tokenizing."""
        return PrepareTimes(
            admit_s=arrival.checked_at - arrival.arrived_at,
            render_s=render_s,
            tokenize_s=self._clock() - arrival.checked_at - render_s,
        )

    def _check_chars(self, num_chars: int, limits: ModelLimits, param: str) -> None:
        """Refuses what cannot fit whatever its tokens are, before tokenizing it."""
        at_least = num_chars // self._tokenizer.max_token_chars
        if at_least > limits.max_model_len:
            raise context_length_exceeded(f"at least {at_least}", 0, limits.max_model_len, param)

    def _work(
        self,
        request: ChatRequest | CompletionRequest,
        arrival: Arrival,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        render_s: float = 0.0,
    ) -> Work:
        limits, num_logprobs = arrival.limits, request.num_logprobs
        check_ids_of_fields(request, limits.vocab_size)
        if request.min_tokens > min(budgets):
            raise invalid(
                f"min_tokens ({request.min_tokens}) is above max_tokens ({min(budgets)}).", param="min_tokens"
            )
        beam = request.beam
        num_choices, num_best = request.n, None
        if beam is None and request.best_of is not None and request.best_of > request.n:
            num_choices, num_best = request.best_of, request.n
        params = SamplingParams(
            max_tokens=0,
            min_tokens=request.min_tokens,
            temperature=float(request.temperature) if beam is None else 0.0,
            top_k=request.top_k if 0 < request.top_k < limits.vocab_size else 0,
            top_p=float(request.top_p),
            min_p=float(request.min_p),
            repetition_penalty=float(request.repetition_penalty),
            presence_penalty=float(request.presence_penalty),
            frequency_penalty=float(request.frequency_penalty),
            logit_bias=tuple((int(key), float(value)) for key, value in request.logit_bias.items()),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            num_logprobs=0 if num_logprobs is None and num_best is not None else num_logprobs,
        )
        options = request.stream_options
        # The key's tenant first, so that a salt from outside only ever separates further.
        salt = arrival.caller.tenant + (f":{request.cache_salt}" if request.cache_salt else "")
        return Work(
            endpoint=Endpoint.CHAT if isinstance(request, ChatRequest) else Endpoint.COMPLETIONS,
            id=arrival.id,
            created=arrival.created,
            arrived_at=arrival.arrived_at,
            prepare=self._times(arrival, render_s),
            caller=arrival.caller,
            limits=limits,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            sampling=tuple(
                replace(
                    params,
                    max_tokens=budget,
                    seed=request.seed if request.seed is not None else self._draw_seed(),
                )
                for budget in budgets
            ),
            num_choices=num_choices,
            num_best=num_best,
            beam=beam,
            cache_salt=salt,
            stops=request.stops,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            asked_grammar=asked_grammar(request.response_format, request.structured_outputs),
            num_logprobs=num_logprobs,
            return_token_ids=request.return_token_ids,
            stream=request.stream,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )


def _budget(num_prompt: int, asked: int | None, default: int, limits: ModelLimits, param: str) -> int:
    """New tokens that a request may have. What the caller asked for must fit; a default is cut to what
    fits."""
    room = limits.max_model_len - num_prompt
    if (room < 1 and asked != 0) or room < 0:
        raise context_length_exceeded(num_prompt, 1 if asked is None else asked, limits.max_model_len, param)
    if asked is None:
        return min(default, room)
    if asked > room:
        raise context_length_exceeded(num_prompt, asked, limits.max_model_len, "max_tokens")
    return asked


def _cut(prompt: list[int], request: GenerationFields, room: int) -> list[int]:
    """The prompt as its client has it cut; `room` is what the budget leaves of the context."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return prompt
    limit = room if limit == -1 else limit
    return cut(prompt, limit, request.truncation_side or "left") if limit > 0 else prompt


def _too_complex(error: TextTimeout, param: str) -> ApiError:
    return invalid(f"Tokenizing took {error}.", param=param, code="prompt_too_complex")
