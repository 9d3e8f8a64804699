"""Prompts that are too long, where the client has said how they may be cut.

Of a text or a rendered conversation, tokens on one side; or of a conversation, its oldest turns as wholes. A
turn is a user's message and what follows it before the next one. System messages stay, and so does the last
user's turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What was left out, over all prompts of a request."""

    dropped_messages: int = 0
    dropped_tokens: int = 0

    def json(self) -> dict[str, int]:
        """As `usage.truncation`."""
        return {"dropped_messages": self.dropped_messages, "dropped_tokens": self.dropped_tokens}


def cut(token_ids: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` of them, which is above 0, without the first ones (left) or the last ones (right)."""
    return token_ids[-limit:] if side == "left" else token_ids[:limit]


def turn_ends(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Where the oldest turn ends, where the one after it, and so on: each is the index of a user's message,
    before which `without_turns` may cut."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), None)
    # What comes before the first user's message is a turn of its own; the last user's turn is never dropped.
    return starts[1:] if starts and starts[0] == first else starts


def without_turns(messages: Sequence[Mapping[str, str]], end: int) -> list[Mapping[str, str]]:
    """The conversation without the turns that end before message `end`."""
    return [message for i, message in enumerate(messages) if i >= end or message["role"] == "system"]
