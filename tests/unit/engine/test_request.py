"""What the engine refuses, by field, code and message."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.toy import VOCAB, make_request, numbers
from workers.engine.request import EngineLimits, validate
from workers.types import RequestRefused

LIMITS = EngineLimits(vocab_size=VOCAB, max_model_len=64, eos_token_ids=(2, 3))
GOOD = make_request("r", numbers(8), 4)


def _refusal(changes: dict[str, Any], sampling: dict[str, Any]) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        validate(replace(GOOD, sampling=replace(GOOD.sampling, **sampling), **changes), LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", 1.0, "max_tokens"),
        ("max_tokens", 1 << 63, "max_tokens"),
        ("min_tokens", 5, "min_tokens"),
        ("min_tokens", -1, "min_tokens"),
        ("temperature", -0.1, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("temperature", math.inf, "temperature"),
        ("temperature", 10**400, "temperature"),
        ("temperature", True, "temperature"),
        ("temperature", "1", "temperature"),
        ("top_k", -1, "top_k"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.0001, "top_p"),
        ("top_p", math.nan, "top_p"),
        ("min_p", -0.1, "min_p"),
        ("min_p", 1.1, "min_p"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("repetition_penalty", math.inf, "repetition_penalty"),
        ("presence_penalty", 2.1, "presence_penalty"),
        ("frequency_penalty", -2.1, "frequency_penalty"),
        ("seed", 1 << 63, "seed"),
        ("seed", -(1 << 63) - 1, "seed"),
        ("seed", 1.5, "seed"),
        ("ignore_eos", 1, "ignore_eos"),
        ("stop_token_ids", (VOCAB,), "stop_token_ids"),
        ("stop_token_ids", (-1,), "stop_token_ids"),
        ("logit_bias", ((VOCAB, 1.0),), "logit_bias"),
        ("logit_bias", ((-1, 1.0),), "logit_bias"),
        ("logit_bias", ((True, 1.0),), "logit_bias"),
        ("logit_bias", ((1, 100.5),), "logit_bias"),
        ("logit_bias", ((1, math.nan),), "logit_bias"),
        ("num_logprobs", 21, "logprobs"),
        ("num_logprobs", -1, "logprobs"),
        ("num_logprobs", True, "logprobs"),
        ("num_prompt_logprobs", 21, "prompt_logprobs"),
    ],
)
def test_refuses_sampling(field: str, value: object, param: str) -> None:
    refused = _refusal({}, {field: value})
    assert (refused.code, refused.param) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt_token_ids", (), "prompt"),
        ("prompt_token_ids", (1, VOCAB), "prompt"),
        ("prompt_token_ids", (1, -1), "prompt"),
        ("prompt_token_ids", (1, True), "prompt"),
        ("prompt_token_ids", (1, 2.0), "prompt"),
        ("prompt_token_ids", (1, 1 << 63), "prompt"),
        ("num_choices", 0, "n"),
        ("num_choices", -1, "n"),
        ("num_choices", 129, "n"),
        ("num_choices", True, "n"),
        ("priority", 1 << 63, "priority"),
        ("cache_salt", 5, "cache_salt"),
    ],
)
def test_refuses_request(field: str, value: object, param: str) -> None:
    refused = _refusal({field: value}, {})
    assert (refused.code, refused.param) == ("invalid_value", param)


def test_messages_carry_the_value_and_the_place() -> None:
    assert _refusal({"prompt_token_ids": (1, 5, 97)}, {}).message == (
        "prompt[2] is 97: token ids are whole numbers from 0 to 96."
    )
    assert _refusal({}, {"top_p": 0}).message == "top_p is 0: it must be a finite number above 0 to 1."
    assert (
        _refusal({}, {"min_tokens": 9}).message == "min_tokens is 9: it must be a whole number from 0 to 4."
    )


def test_min_tokens_needs_a_token_that_does_not_end() -> None:
    every = tuple(token for token in range(VOCAB) if token not in LIMITS.eos_token_ids)
    refused = _refusal({}, {"min_tokens": 1, "stop_token_ids": every})
    assert (refused.code, refused.param) == ("invalid_value", "stop_token_ids")
    accepted: list[dict[str, Any]] = [{"min_tokens": 0}, {"min_tokens": 1, "ignore_eos": True}]
    for sampling in accepted:
        params = replace(GOOD.sampling, stop_token_ids=every, **sampling)
        validate(replace(GOOD, sampling=params), LIMITS)


def test_context_length_names_all_numbers() -> None:
    refused = _refusal({"prompt_token_ids": numbers(60)}, {"max_tokens": 5})
    assert (refused.code, refused.param) == ("context_length_exceeded", "max_tokens")
    assert refused.message == (
        "The context length is 64 tokens; the prompt has 60 and max_tokens asks for 5, together 65. "
        "Shorten the prompt or lower max_tokens."
    )
    assert _refusal({"prompt_token_ids": numbers(64)}, {"max_tokens": 1}).param == "prompt"


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 56},
        {"max_tokens": 0},
        {"min_tokens": 4},
        {"temperature": 5e-324},
        {"temperature": 0},
        {"top_p": 1e-9},
        {"top_k": 1 << 40},
        {"min_p": 1},
        {"seed": -(1 << 63)},
        {"seed": (1 << 63) - 1},
        {"logit_bias": ((0, -100), (VOCAB - 1, 100.0))},
        {"stop_token_ids": (0, VOCAB - 1)},
        {"num_logprobs": 20, "num_prompt_logprobs": 0},
    ],
)
def test_takes_the_edges(sampling: dict[str, Any]) -> None:
    validate(replace(GOOD, sampling=replace(GOOD.sampling, **sampling)), LIMITS)
