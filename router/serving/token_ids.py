"""Token ids that a request names itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.api.errors import invalid, short
from router.api.protocol import GenerationFields


def checked_ids(ids: Sequence[Any], vocab_size: int, path: str) -> list[int]:
    """Token ids of a request. Raises ApiError 400 naming the first that is none."""
    # The common case in C, since prompts are long; the loop finds the culprit.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return list(ids)
    for i, value in enumerate(ids):
        if type(value) is not int:  # bool is a subclass, and no id
            raise invalid(
                f"{path}[{i}] must be a token id, got {short(value)}.",
                param=f"{path}[{i}]",
                code="invalid_type",
            )
        if not 0 <= value < vocab_size:
            raise invalid(
                f"{path}[{i}] is {short(value)}; token ids are 0 to {vocab_size - 1}.", param=f"{path}[{i}]"
            )
    raise AssertionError("one of the ids is wrong")


def check_ids_of_fields(request: GenerationFields, vocab_size: int) -> None:
    """Those of `stop_token_ids` and `logit_bias`. Raises ApiError 400."""
    checked_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    for key in request.logit_bias:
        is_plain = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
        if not (is_plain and int(key) < vocab_size):
            raise invalid(
                f"logit_bias: {short(key)} is no token id; they are 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
    masked = {int(key) for key, value in request.logit_bias.items() if value == -100}
    if len(masked) == vocab_size:
        raise invalid(
            "logit_bias masks every token of the vocabulary.", param="logit_bias", code="no_allowed_token"
        )
