"""What is guessed from a sequence's own tokens."""

from __future__ import annotations

import random

from workers.decoding.prompt_lookup import LONGEST_GRAM, SHORTEST_GRAM, PromptLookup


def _lookup(*token_ids: int) -> PromptLookup:
    lookup = PromptLookup()
    lookup.extend(token_ids)
    return lookup


def test_what_followed_the_same_tokens_is_guessed() -> None:
    assert _lookup(1, 2, 3, 4, 5, 9, 1, 2).propose(3) == (3, 4, 5)


def test_the_newest_occurrence_counts() -> None:
    assert _lookup(1, 2, 3, 8, 1, 2, 4, 8, 1, 2).propose(2) == (4, 8)


def test_a_longer_match_counts_more_than_a_newer_one() -> None:
    assert _lookup(7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2).propose(1) == (3,)


def test_nothing_new_is_guessed() -> None:
    assert _lookup().propose(4) == ()
    assert _lookup(1).propose(4) == ()
    assert _lookup(1, 2, 3).propose(4) == ()
    assert _lookup(1, 2, 3, 2).propose(4) == ()  # one token alone says too little


def test_a_repetition_goes_on() -> None:
    assert _lookup(5, 1, 2, 1, 2).propose(5) == (1, 2, 1, 2, 1)
    assert _lookup(3, 3, 3).propose(4) == (3, 3, 3, 3)


def test_told_at_once_or_bit_by_bit_is_the_same() -> None:
    draw = random.Random(3)
    tokens = [draw.randrange(4) for _ in range(200)]
    grown = PromptLookup()
    for end in range(1, len(tokens) + 1):
        grown.extend(tokens[end - 1 : end])
        assert grown.propose(6) == _lookup(*tokens[:end]).propose(6) == _searched(tokens[:end], 6)


def _searched(tokens: list[int], max_tokens: int) -> tuple[int, ...]:
    """By looking everywhere."""
    end = len(tokens)
    for size in range(min(LONGEST_GRAM, end), SHORTEST_GRAM - 1, -1):
        for start in range(end - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[end - size :]:
                repeated = list(tokens)
                for index in range(max_tokens):
                    repeated.append(repeated[start + index])
                return tuple(repeated[end:])
    return ()
