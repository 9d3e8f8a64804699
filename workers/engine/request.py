"""What a group accepts, and the state of a request that it has accepted.

A request of n choices is n sequences (`workers.engine.sequence`) with one prompt. This module holds what they
share: the checked request, its place in the order of service, the ids that end a choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from workers.hashing import BlockHash, block_hashes
from workers.types import (
    INVALID_GRAMMAR,
    MAX_BEAM_WIDTH,
    MAX_GRAMMAR_BYTES,
    BeamParams,
    EarlyStopping,
    GenerateRequest,
    Grammar,
    GrammarKind,
    KVSource,
    RequestRefused,
    SamplingParams,
    StageTimes,
)

if TYPE_CHECKING:
    from workers.engine.fetch import Fetch

MAX_CHOICES = 128
MAX_LOGPROBS = 20
_MAX_LENGTH_PENALTY = 10.0  # and the least, with the sign changed: 10,000 tokens ** 10 is far from infinity
_MAX_NAME_LENGTH = 255  # of a host or a group
_TRANSFER_ID_LENGTH = 32
_HEX_DIGITS = frozenset("0123456789abcdef")
_INT64 = 1 << 63
_LARGEST = 1e9  # of a temperature or penalty that has no other bound


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the model can do. End ids that the vocabulary does not have can never come and are left out."""

    vocab_size: int
    max_model_len: int  # prompt and output tokens together
    eos_token_ids: tuple[int, ...]
    is_prefix_reusable: bool = True  # False: what a block holds depends on the tokens after it too
    window: int | None = None  # tokens that a row sees at most, itself included; None: all
    turns_by_length: bool = False  # keys depend on the length of their sequence
    recompute_past: int | None = None  # a sequence longer than that needs all its keys anew; None: none does
    max_pass_rows: int | None = None  # logits of more rows take a second pass of the whole step; None: never


class RequestState:
    """A request from its acceptance until its last choice ends."""

    __slots__ = (
        "admitted_s",
        "arrival",
        "arrived_s",
        "awaits_grammar",
        "end_ids",
        "fetch",
        "fetch_s",
        "first_choice",
        "is_admitted",
        "is_counted",
        "max_num_tokens",
        "num_fetched_blocks",
        "num_unfinished",
        "prompt_hashes",
        "request",
    )

    def __init__(
        self, request: GenerateRequest, *, limits: EngineLimits, arrival: int, block_size: int | None
    ) -> None:
        """block_size None: no prefix reuse, no hashes."""
        sampling = request.sampling
        self.request = request
        self.arrival = arrival  # rank among requests of one priority
        self.end_ids = _end_ids(sampling, limits)
        # Of each choice; the context length is the other bound, and validate() has compared the two.
        self.max_num_tokens = len(request.prompt_token_ids) + sampling.max_tokens
        self.prompt_hashes: list[BlockHash] = []
        if block_size is not None:
            self.prompt_hashes = block_hashes(request.prompt_token_ids, block_size, request.cache_salt)
        self.is_counted = True  # in totals, and its length in the estimate of others'
        self.is_admitted = False  # a choice has had blocks
        self.awaits_grammar = False  # which is being compiled: not to be admitted yet
        self.fetch: Fetch | None = None  # blocks from another group, until it is admitted
        # For metrics: times of the engine's clock, and what other groups gave.
        self.arrived_s = self.fetch_s = 0.0  # when it was added; how long fetches were open
        self.admitted_s: float | None = None
        self.num_fetched_blocks = 0
        choices = request.choices()
        self.first_choice = min(choices)  # the others share its prompt; 0 may have ended elsewhere
        self.num_unfinished = 1 if request.beam is not None else len(choices)  # sequences

    def times(self, now_s: float) -> StageTimes:
        """Where the time went until its first token, which has just come."""
        admitted_s = self.arrived_s if self.admitted_s is None else self.admitted_s
        waited_s = admitted_s - self.arrived_s
        return StageTimes(
            queue_s=max(0.0, waited_s - self.fetch_s),
            transfer_s=min(self.fetch_s, waited_s),
            compute_s=now_s - admitted_s,
        )


def _end_ids(sampling: SamplingParams, limits: EngineLimits) -> frozenset[int]:
    eos = () if sampling.ignore_eos else limits.eos_token_ids
    return frozenset((*sampling.stop_token_ids, *(token for token in eos if 0 <= token < limits.vocab_size)))


def needs_host(request: GenerateRequest, end_ids: frozenset[int]) -> bool:
    """Whether a token of it takes more than drawing an id from a row of logits: what is known of the tokens
    before it, or numbers beside the id. Such a request is never planned ahead (`workers.engine.ahead`)."""
    sampling = request.sampling
    return bool(
        request.grammar is not None
        or request.beam is not None
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.logit_bias
        or (sampling.min_tokens > 0 and end_ids)
        or sampling.num_logprobs is not None
        or sampling.num_prompt_logprobs is not None
    )


def validate(request: GenerateRequest, limits: EngineLimits) -> None:
    """Raises RequestRefused for anything the engine could not carry to an end.

    The router checks the same at its door; the engine does not rely on it.
    """
    _check_prompt(request.prompt_token_ids, limits)
    _check_int("n", request.num_choices, 1, MAX_CHOICES)
    _check_begun(request, limits)
    _check_int("priority", request.priority, -_INT64, _INT64 - 1)
    if not isinstance(request.cache_salt, str):
        raise _refused("cache_salt", request.cache_salt, "text")
    _check_transfer_id("transfer_id", request.transfer_id)
    if request.kv_source is not None:
        check_source(request.kv_source)
    if request.grammar is not None:
        _check_grammar(request.grammar)
    _check_sampling(request.sampling, limits)
    if request.beam is not None:
        _check_beam(request, request.beam, limits)
    prompt, new = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt + new > limits.max_model_len:
        raise RequestRefused(
            f"The context length is {limits.max_model_len} tokens; the prompt has {prompt} and max_tokens "
            f"asks for {new}, together {prompt + new}. Shorten the prompt or lower max_tokens.",
            code="context_length_exceeded",
            param="max_tokens" if prompt < limits.max_model_len else "prompt",
        )


def duplicate_id(request: GenerateRequest) -> RequestRefused:
    """For a request whose id another one has."""
    message = f"Request id {request.request_id!r} is in use."
    return RequestRefused(message, code="duplicate_request_id", param="request_id")


def queue_full(max_waiting: int) -> RequestRefused:
    """For a request that finds too many before it."""
    return RequestRefused(
        f"{max_waiting} requests are waiting, the most allowed (max_waiting). Try again later.",
        code="queue_full",
    )


def check_fits(request: GenerateRequest, num_blocks: int, block_size: int, max_rows: int) -> None:
    """Raises RequestRefused for a request that could not run even with the group to itself: num_blocks in
    its KV pool, max_rows of newest tokens in a step."""
    prompt, new = len(request.prompt_token_ids), request.sampling.max_tokens
    tokens = prompt + max(0, new - 1)  # the token sampled last is never computed
    blocks = -(-tokens // block_size)
    with_beams = ""
    if request.beam is not None:
        width = request.beam.width
        if width > max_rows:
            raise RequestRefused(
                f"A beam search of width {width} computes {width} tokens a step; this group computes at most "
                f"{max_rows} (the lower of max_step_tokens and max_running). Lower the width.",
                code="beam_width_too_large",
                param="best_of",
            )
        # All share the full blocks of the prompt; of the others each may come to have its own.
        blocks += (width - 1) * (blocks - prompt // block_size)
        with_beams = f" and a beam search of width {width}"
    if blocks > num_blocks:
        raise RequestRefused(
            f"A prompt of {prompt} tokens with max_tokens {new}{with_beams} needs {blocks} KV blocks; the "
            f"whole pool has {num_blocks} ({num_blocks * block_size} tokens). Lower max_tokens, shorten the "
            "prompt, or give the group more KV memory.",
            code="kv_pool_too_small",
            param="max_tokens",
        )


def _check_beam(request: GenerateRequest, beam: BeamParams, limits: EngineLimits) -> None:
    _check_int("best_of", beam.width, request.num_choices, MAX_BEAM_WIDTH)
    _check_number("length_penalty", beam.length_penalty, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY)
    if not isinstance(beam.early_stopping, EarlyStopping):
        raise _refused("early_stopping", beam.early_stopping, "one of EarlyStopping")
    if request.sampling.temperature != 0.0:
        raise _refused("temperature", request.sampling.temperature, "0 in a beam search")
    _check_int("max_tokens", request.sampling.max_tokens, 1, _INT64 - 1)
    num_going_on = limits.vocab_size - len(_end_ids(request.sampling, limits))
    if beam.width > num_going_on:
        raise RequestRefused(
            f"A beam search of width {beam.width} needs as many tokens to begin with: the vocabulary has "
            f"{num_going_on} that do not end the text.",
            param="best_of",
        )
    if request.grammar is not None:
        raise RequestRefused(
            "A beam search cannot follow a grammar: leave out response_format and structured_outputs.",
            param="use_beam_search",
        )
    if request.begun:
        raise RequestRefused("A beam search starts anew on another group: it has no begun.", param="begun")


def _check_grammar(grammar: Grammar) -> None:
    if not (isinstance(grammar, Grammar) and isinstance(grammar.kind, GrammarKind)):
        raise _refused("grammar", grammar, "a grammar")
    size = len(grammar.text.encode()) if isinstance(grammar.text, str) else 0
    if not 1 <= size <= MAX_GRAMMAR_BYTES:
        raise RequestRefused(
            f"The grammar of this request has {size} bytes: it must have 1 to {MAX_GRAMMAR_BYTES}.",
            code=INVALID_GRAMMAR,
            param="grammar",
        )


def _check_begun(request: GenerateRequest, limits: EngineLimits) -> None:
    last = -1
    for index, begun in enumerate(request.begun):
        _check_int(f"begun[{index}].choice", begun.choice, last + 1, request.num_choices - 1)
        last = begun.choice
        _check_token_ids(f"begun[{index}].token_ids", begun.token_ids, limits)
        most = max(request.sampling.max_tokens - 1, 0)
        if len(begun.token_ids) > most:
            raise RequestRefused(
                f"begun[{index}] has {len(begun.token_ids)} tokens: one that goes on has at most {most}.",
                param="begun",
            )


def is_transfer_id(value: object) -> TypeGuard[str]:
    """Whether it names a transfer: 128 bits as 32 lower-case hex digits."""
    return isinstance(value, str) and len(value) == _TRANSFER_ID_LENGTH and set(value) <= _HEX_DIGITS


def check_source(source: KVSource) -> None:
    """Raises RequestRefused for a source that cannot be one."""
    if not isinstance(source, KVSource):
        raise _refused("kv_source", source, "a group to read from")
    for param, name in (("kv_source.group_id", source.group_id), ("kv_source.host", source.host)):
        # isprintable is False for line ends and other controls, which have no place in a log either.
        if not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable()):
            raise _refused(param, name, f"1 to {_MAX_NAME_LENGTH} printable characters")
    _check_int("kv_source.port", source.port, 1, 65_535)
    _check_transfer_id("kv_source.transfer_id", source.transfer_id)


def _check_transfer_id(param: str, value: object) -> None:
    if value is not None and not is_transfer_id(value):
        raise _refused(param, value, f"{_TRANSFER_ID_LENGTH} lower-case hex digits")


def _check_prompt(token_ids: tuple[int, ...], limits: EngineLimits) -> None:
    if not token_ids:
        raise RequestRefused("The prompt is empty: at least one token is needed.", param="prompt")
    _check_token_ids("prompt", token_ids, limits)


def _check_token_ids(param: str, token_ids: Iterable[int], limits: EngineLimits) -> None:
    ids = tuple(token_ids)
    # set(map(type, ...)) runs in C: a prompt of 50,000 tokens is checked in about a millisecond. bool is
    # refused.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= limits.vocab_size):
        index, bad = next(
            (i, t) for i, t in enumerate(ids) if type(t) is not int or not 0 <= t < limits.vocab_size
        )
        raise RequestRefused(
            f"{param}[{index}] is {bad!r}: token ids are whole numbers from 0 to {limits.vocab_size - 1}.",
            param=param,
        )


def _check_sampling(sampling: SamplingParams, limits: EngineLimits) -> None:
    _check_int("max_tokens", sampling.max_tokens, 0, _INT64 - 1)
    _check_int("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    _check_int("top_k", sampling.top_k, 0, _INT64 - 1)
    _check_int("seed", sampling.seed, -_INT64, _INT64 - 1)
    _check_number("temperature", sampling.temperature, 0.0, _LARGEST)
    _check_number("top_p", sampling.top_p, 0.0, 1.0, above=True)
    _check_number("min_p", sampling.min_p, 0.0, 1.0)
    _check_number("repetition_penalty", sampling.repetition_penalty, 0.0, _LARGEST, above=True)
    _check_number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if type(sampling.ignore_eos) is not bool:
        raise _refused("ignore_eos", sampling.ignore_eos, "true or false")
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, limits)
    if sampling.min_tokens > 0 and len(_end_ids(sampling, limits)) == limits.vocab_size:
        raise RequestRefused(
            f"stop_token_ids names every token: none is left for the first {sampling.min_tokens}.",
            param="stop_token_ids",
        )
    _check_token_ids("logit_bias", (token for token, _ in sampling.logit_bias), limits)
    for _, bias in sampling.logit_bias:
        _check_number("logit_bias", bias, -100.0, 100.0)
    for param, count in (
        ("logprobs", sampling.num_logprobs),
        ("prompt_logprobs", sampling.num_prompt_logprobs),
    ):
        if count is not None:
            _check_int(param, count, 0, MAX_LOGPROBS)


def _check_int(param: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _refused(param, value, f"a whole number from {low} to {high}")


def _check_number(param: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    # Comparisons alone: they refuse NaN and infinity, and are exact for an int too large for a float.
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value <= high
        and not (above and value == low)
    ):
        return
    raise _refused(param, value, f"a finite number {'above' if above else 'from'} {low:g} to {high:g}")


def _refused(param: str, value: object, expected: str) -> RequestRefused:
    return RequestRefused(f"{param} is {value!r}: it must be {expected}.", param=param)
