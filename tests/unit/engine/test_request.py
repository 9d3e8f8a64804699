"""What the engine refuses, by field, code and message."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.toy import VOCAB, make_request, numbers
from workers.engine.request import EngineLimits, validate
from workers.types import GroupId, KVSource, RequestRefused

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


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"group_id": ""}, "kv_source.group_id"),
        ({"group_id": 7}, "kv_source.group_id"),
        ({"group_id": "g" * 256}, "kv_source.group_id"),
        ({"host": ""}, "kv_source.host"),
        ({"host": "h" * 256}, "kv_source.host"),
        ({"host": "10.0.0.1\nGET /"}, "kv_source.host"),
        ({"host": "\ud800"}, "kv_source.host"),
        ({"port": 0}, "kv_source.port"),
        ({"port": 65_536}, "kv_source.port"),
        ({"port": True}, "kv_source.port"),
        ({"transfer_id": ""}, "kv_source.transfer_id"),
        ({"transfer_id": "0" * 31}, "kv_source.transfer_id"),
        ({"transfer_id": "0" * 33}, "kv_source.transfer_id"),
        ({"transfer_id": "A" * 32}, "kv_source.transfer_id"),
        ({"transfer_id": "٠" * 32}, "kv_source.transfer_id"),
        ({"transfer_id": b"0" * 32}, "kv_source.transfer_id"),
    ],
)
def test_refuses_sources(changes: dict[str, Any], param: str) -> None:
    good = KVSource(group_id=GroupId("g"), host="10.0.0.1", port=1, transfer_id="0123456789abcdef" * 2)
    validate(replace(GOOD, kv_source=good, transfer_id=good.transfer_id), LIMITS)
    refused = _refusal({"kv_source": replace(good, **changes)}, {})
    assert (refused.code, refused.param) == ("invalid_value", param)
    if "transfer_id" in changes:
        assert _refusal(changes, {}).param == "transfer_id"


def test_refuses_what_is_no_source() -> None:
    assert _refusal({"kv_source": ("g", "10.0.0.1", 1)}, {}).param == "kv_source"


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
