"""Which request fields exist, beyond those that the models of `protocol` define.

Three kinds, so that nothing is ignored by accident:

- ACCEPTED: of no effect here, and harmless to leave out; but a value of another type than OpenAI's is a
  mistake, as there. Nothing is echoed.
- UNSUPPORTED: known from OpenAI, vLLM or SGLang, not served: 400 `unsupported_parameter` that names the
  field, unless the value says "off" (the values listed with it).
- anything else: 400 `unknown_parameter`, with a suggestion.

A field sent as null is unset, everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from router.api.errors import ApiError, invalid, quoted, short, unsupported

ACCEPTED: Mapping[str, type] = {
    "user": str,
    "metadata": dict,
    "service_tier": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "verbosity": str,
    "parallel_tool_calls": bool,
}
_NAMES: Mapping[type, str] = {str: "a string", dict: "an object", bool: "true or false"}

# Field -> values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": (),
    "documents": (),
    "ebnf": (),
    "function_call": (),
    "functions": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "priority": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "request_id": (),
    "session_id": (),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": (),
    "tools": (),
    "web_search_options": (),
}


def known_fields(
    body: Mapping[str, Any], fields: Iterable[str], *, only_elsewhere: Mapping[str, str], lenient: bool
) -> dict[str, Any]:
    """The set fields that a model defines. Raises ApiError 400 for the others, as this module's table says.

    `only_elsewhere` names fields of another endpoint, and that endpoint.
    """
    fields = frozenset(fields)
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in fields:
            if value is not None:
                kept[name] = value
        elif value is None and (name in ACCEPTED or name in UNSUPPORTED or name in only_elsewhere):
            continue
        elif name in ACCEPTED:
            if not isinstance(value, ACCEPTED[name]):
                wanted = f"{name}: expected {_NAMES[ACCEPTED[name]]}, got {short(value)}."
                raise invalid(wanted, param=name, code="invalid_type")
        elif name in UNSUPPORTED:
            if not any(type(value) is type(off) and value == off for off in UNSUPPORTED[name]):
                raise unsupported(name)
        elif name in only_elsewhere:
            raise unsupported(name, f"belongs to {only_elsewhere[name]}, not to this endpoint")
        elif not lenient:
            raise _unknown(name, fields)
    return kept


def _unknown(name: str, fields: frozenset[str]) -> ApiError:
    close = get_close_matches(name[:64], fields, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return invalid(f"Unknown parameter: {quoted(name)}.{hint}", param=name[:64], code="unknown_parameter")
