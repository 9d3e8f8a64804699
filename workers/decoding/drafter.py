"""What a way of guessing the next tokens of one sequence has to do, and all the ways there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.decoding.lookahead import Lookahead
from workers.decoding.prompt_lookup import PromptLookup

METHODS = ("prompt_lookup", "lookahead")  # of one sequence, from its tokens
DRAFT_MODEL = "draft_model"  # of all sequences, by a second model
MEDUSA = "medusa"  # of all sequences, by heads on the model's last hidden states
MODEL_METHODS = (DRAFT_MODEL, MEDUSA)  # those that need a folder


class Drafter(Protocol):
    """Of one growing sequence. Guesses cost nothing but rows of a step: wrong ones change no answer."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that it has been told."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these."""
        ...

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` that may come next."""
        ...

    def note_checked(self, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """The model has been given the newest token and `drafts`, and has said one more token after each;
        called before `extend` tells which of them count."""
        ...


def drafter_of(method: str) -> Drafter:
    """A new one. Raises ValueError for a method that is not of METHODS."""
    if method == "prompt_lookup":
        return PromptLookup()
    if method == "lookahead":
        return Lookahead()
    legal = ", ".join(("none", *METHODS, *MODEL_METHODS))
    raise ValueError(f"speculative.method is {method!r}: it must be one of {legal}")
