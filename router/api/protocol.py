"""Requests of the HTTP API as typed, checked objects.

A body goes through three gates: `fields` (does the field exist), the pydantic models here (strict
types and fixed ranges, no casts), and the checks below for what depends on settings or on several fields.
Messages are checked by `messages`; what needs the tokenizer or the model's limits by
`router.serving.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from router.api.errors import ApiError, invalid, quoted, short, unsupported
from router.api.fields import known_fields
from router.settings import RouterSettings
from workers.types import MAX_BEAM_WIDTH, BeamParams, EarlyStopping

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

Penalty = Annotated[float, Field(ge=-2, le=2)]
_EARLY_STOPPING: Mapping[bool | str, EarlyStopping] = {
    True: EarlyStopping.YES,
    False: EarlyStopping.NO,
    "never": EarlyStopping.NEVER,
}


class Strict(BaseModel):
    """No casts, no unknown fields, no infinities."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    """What a stream carries beside tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk
    include_obfuscation: bool | None = None  # accepted, no effect


class GenerationFields(Strict):
    """Fields that chat and completions share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # accepted, no effect: our tokenizers are fast ones
    logit_bias: dict[str, float] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = (
        None  # -1: what max_tokens leaves of the context
    )
    truncation_side: Literal["left", "right"] | None = None  # where tokens are cut; left when not given
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = (
        None  # so many are made, the best n given out; a beam's width
    )
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def is_cut(self) -> bool:
        """Whether its prompt may be cut to fit."""
        return self.truncate_prompt_tokens is not None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, however they were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def beam(self) -> BeamParams | None:
        """How to search; None: sample."""
        if not self.use_beam_search:
            return None
        return BeamParams(
            width=self.best_of or self.n,
            length_penalty=float(self.length_penalty),
            early_stopping=_EARLY_STOPPING[self.early_stopping],
        )


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None  # wins over max_tokens
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncation: Literal["auto", "disabled"] = "disabled"  # auto: the oldest turns are dropped until it fits
    add_special_tokens: bool = False  # the template writes them

    @property
    def is_cut(self) -> bool:
        """Whether its prompt may be cut to fit."""
        return self.truncation == "auto" or self.truncate_prompt_tokens is not None

    @property
    def num_logprobs(self) -> int | None:
        """As in SamplingParams."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt`: text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        """As in SamplingParams."""
        return self.logprobs


class TokenizeRequest(Strict):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Any]


Model = TypeVar("Model", bound=Strict)

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_ELSEWHERE: Mapping[type[Strict], Mapping[str, str]] = {
    ChatRequest: dict.fromkeys(
        set(CompletionRequest.model_fields) - set(ChatRequest.model_fields), _COMPLETIONS
    ),
    CompletionRequest: dict.fromkeys(
        set(ChatRequest.model_fields) - set(CompletionRequest.model_fields), _CHAT
    ),
}


def parse_chat(body: Mapping[str, Any], settings: RouterSettings) -> ChatRequest:
    """A checked chat request. Raises ApiError 400."""
    request = _parse(ChatRequest, body, settings)
    _check_shared(request, settings)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise invalid("top_logprobs needs logprobs to be true.", param="top_logprobs")
        _check_range("top_logprobs", request.top_logprobs, 0, settings.max_logprobs)
    for name, budget in (
        ("max_completion_tokens", request.max_completion_tokens),
        ("max_tokens", request.max_tokens),
    ):
        if budget is not None and budget < 1:
            raise invalid(f"{name} must be at least 1, got {short(budget)}.", param=name)
    if request.continue_final_message and body.get("add_generation_prompt"):
        raise invalid(
            "add_generation_prompt and continue_final_message exclude each other.",
            param="continue_final_message",
        )
    if request.truncation == "auto" and request.truncate_prompt_tokens is not None:
        raise invalid("truncation and truncate_prompt_tokens exclude each other.", param="truncation")
    return request


def parse_completion(body: Mapping[str, Any], settings: RouterSettings) -> CompletionRequest:
    """A checked completions request. Raises ApiError 400."""
    request = _parse(CompletionRequest, body, settings)
    _check_shared(request, settings)
    if request.logprobs is not None:
        _check_range("logprobs", request.logprobs, 0, settings.max_logprobs)
    if request.max_tokens is not None and request.max_tokens < (0 if request.echo else 1):
        raise invalid(
            f"max_tokens must be at least 1, got {short(request.max_tokens)} (0 only scores a prompt, "
            "together with echo).",
            param="max_tokens",
        )
    return request


def parse_tokenize(body: Mapping[str, Any], settings: RouterSettings) -> TokenizeRequest:
    """A checked request to tokenize. Raises ApiError 400."""
    request = _parse(TokenizeRequest, body, settings)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("Give either prompt or messages.", param="prompt", code="missing_required_parameter")
    return request


def parse_detokenize(body: Mapping[str, Any], settings: RouterSettings) -> DetokenizeRequest:
    """A checked request to detokenize. Raises ApiError 400."""
    return _parse(DetokenizeRequest, body, settings)


def _parse(model: type[Model], body: Mapping[str, Any], settings: RouterSettings) -> Model:
    fields = known_fields(
        body, model.model_fields, only_elsewhere=_ELSEWHERE.get(model, {}), lenient=settings.lenient
    )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False, include_context=True)[0]) from None


def _as_api_error(detail: ErrorDetails) -> ApiError:
    # The branch of a union (`str`, `list[str]`) is no part of the field's name.
    location = [part for part in detail["loc"] if isinstance(part, int) or part.isidentifier()]
    if len(location) > 1 and location[1] in ("str", "int", "list", "bool"):
        del location[1]
    param = _path(location)
    if detail["type"] == "missing":
        return invalid(
            f"Missing required parameter: {param}.", param=param, code="missing_required_parameter"
        )
    if detail["type"] == "extra_forbidden":
        return invalid(f"Unknown parameter: {quoted(param)}.", param=param, code="unknown_parameter")
    message = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    code = "invalid_type" if detail["type"].endswith("_type") else "invalid_value"
    return invalid(f"{param}: expected {message}, got {short(detail['input'])}.", param=param, code=code)


def _path(location: Sequence[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:128]


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid(f"{name} must be between {low} and {high}, got {short(value)}.", param=name)


def _check_choices(request: GenerationFields, settings: RouterSettings) -> None:
    """How many choices, of how many."""
    _check_range("n", request.n, 1, settings.max_choices)
    if request.best_of is not None:
        most = MAX_BEAM_WIDTH if request.use_beam_search else settings.max_choices
        _check_range("best_of", request.best_of, 1, most)
        if request.best_of < request.n:
            raise invalid(f"best_of ({request.best_of}) must be at least n ({request.n}).", param="best_of")
        if request.best_of > 1 and request.stream:
            raise invalid("best_of above 1 cannot be streamed.", param="best_of")
        is_sampled_chat = isinstance(request, ChatRequest) and not request.use_beam_search
        if request.best_of > request.n and is_sampled_chat:
            raise unsupported(
                "best_of", f"above n ({request.n}) belongs to {_COMPLETIONS} or needs use_beam_search"
            )


def _check_beam(request: GenerationFields) -> None:
    """What goes with a beam search and what only there."""
    if not request.use_beam_search:
        for name, is_set in (
            ("length_penalty", request.length_penalty != 1.0),
            ("early_stopping", request.early_stopping is not False),
        ):
            if is_set:
                raise invalid(f"{name} needs use_beam_search to be true.", param=name)
        return
    if request.temperature != 0.0 and "temperature" in request.model_fields_set:
        raise invalid(
            "A beam search (use_beam_search) draws nothing at random: temperature must be 0 or left out, got "
            f"{request.temperature}.",
            param="temperature",
        )
    if request.max_tokens == 0:
        raise invalid("A beam search (use_beam_search) needs max_tokens of at least 1.", param="max_tokens")
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise unsupported("response_format", "does not go with use_beam_search")
    if request.structured_outputs is not None:
        raise unsupported("structured_outputs", "does not go with use_beam_search")
    if request.stream:
        raise invalid("A beam search (use_beam_search) cannot be streamed.", param="stream")


def _check_shared(request: GenerationFields, settings: RouterSettings) -> None:
    _check_choices(request, settings)
    _check_beam(request)
    if len(request.stops) > settings.max_stops:
        raise invalid(f"stop: at most {settings.max_stops} strings, got {len(request.stops)}.", param="stop")
    for text in request.stops:
        if not 1 <= len(text) <= settings.max_stop_chars:
            raise invalid(
                f"stop: a stop string has 1 to {settings.max_stop_chars} characters, got {len(text)}.",
                param="stop",
            )
    if len(request.stop_token_ids) > settings.max_stop_token_ids:
        raise invalid(f"stop_token_ids: at most {settings.max_stop_token_ids} ids.", param="stop_token_ids")
    if request.truncate_prompt_tokens == 0:
        raise invalid(
            "truncate_prompt_tokens is 0, which leaves no prompt: it must be -1 or above 0.",
            param="truncate_prompt_tokens",
        )
    if request.truncation_side is not None and request.truncate_prompt_tokens is None:
        raise invalid("truncation_side needs truncate_prompt_tokens.", param="truncation_side")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream to be true.", param="stream_options")
    if len(request.logit_bias) > settings.max_logit_bias:
        raise invalid(
            f"logit_bias: at most {settings.max_logit_bias} entries, got {len(request.logit_bias)}.",
            param="logit_bias",
        )
    for key, value in request.logit_bias.items():
        if not -100 <= value <= 100:
            raise invalid(
                f"logit_bias: {quoted(key)} must be between -100 and 100, got {value}.", param="logit_bias"
            )
