"""Chat messages: checked, and brought to the one form that chat templates take.

Content given as a list of text parts means the same as the parts' texts joined by a newline. The role
`developer` means `system`, as OpenAI defines it for models that know no developer role. Nothing is ever
fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.api.errors import invalid, quoted, short, unsupported

PART_SEPARATOR = "\n"  # between the text parts of one message

_ROLES = ("system", "developer", "user", "assistant")
_TOOL_FIELDS = ("tool_calls", "function_call", "tool_call_id")
# What SDKs send back with the answers they got; not shown to the model.
_IGNORED_OF_ANSWERS = frozenset({"refusal", "annotations", "audio", "token_ids", "reasoning"})


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Messages as the chat template takes them: content is one string. Raises ApiError 400 with an index
    path."""
    if not messages:
        raise invalid("messages must hold at least one message.", param="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], path: str) -> dict[str, str]:
    role = message.get("role")
    if role is None:
        raise invalid(f"{path}.role is missing.", param=f"{path}.role", code="missing_required_parameter")
    if role in ("tool", "function"):
        raise unsupported(f"{path}.role", f"{quoted(role)} is not supported: this server has no tools yet")
    if role not in _ROLES or not isinstance(role, str):
        raise invalid(
            f"{path}.role must be one of {', '.join(_ROLES)}, got {short(role)}.", param=f"{path}.role"
        )
    result = {"role": "system" if role == "developer" else role}
    for name, value in message.items():
        if value is None or value == [] or name in ("role", "content"):
            continue
        if name in _TOOL_FIELDS:
            raise unsupported(f"{path}.{name}")
        if name == "name":
            if not isinstance(value, str):
                raise invalid(f"{path}.name must be a string.", param=f"{path}.name", code="invalid_type")
            result["name"] = value
        elif name not in _IGNORED_OF_ANSWERS:
            raise invalid(
                f"Unknown parameter: {quoted(f'{path}.{name}')}.",
                param=f"{path}.{name}"[:128],
                code="unknown_parameter",
            )
    result["content"] = _content(message.get("content"), f"{path}.content")
    return result


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(
            f"{path} must be a string or a list of text parts, got {short(content)}.",
            param=path,
            code="invalid_type",
        )
    if not content:
        raise invalid(f"{path} must hold at least one text part.", param=path)
    return PART_SEPARATOR.join(_text_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _text_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"{path} must be an object with type and text.", param=path, code="invalid_type")
    kind = part.get("type")
    if kind != "text":
        raise invalid(
            f"{path} has the type {short(kind)}; only text parts are supported, and nothing is ever fetched.",
            param=f"{path}.type",
            code="unsupported_content",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{path}: a part of type text needs the string text.", param=f"{path}.text")
    return text
