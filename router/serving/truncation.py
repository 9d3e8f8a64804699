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


def shorter_chats(messages: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """The conversation without its oldest turn, without its two oldest, and so on."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
    others = [i for i, message in enumerate(messages) if message["role"] != "system"]
    # What comes before the first user's message is a turn of its own; the last user's turn is never dropped.
    ends = starts[1:] if starts and starts[0] == others[0] else starts
    return [
        [message for i, message in enumerate(messages) if i >= end or message["role"] == "system"]
        for end in ends
    ]
