"""What is asked of a step's message without laying it out."""

from __future__ import annotations

import pytest

from workers.kernels import StepMessage, fill_in, has_placeholders, pack_step

LARGEST = 2**31 - 1


def of_ids(*token_ids: int) -> StepMessage:
    """With numbers below zero before and behind the ids, where they are none."""
    return pack_step(
        lens=[1, len(token_ids) - 1],
        starts=[LARGEST - 10, 0],
        block_counts=[-1, -1],
        token_ids=token_ids,
        blocks=[-1, -1],
        logit_rows=[-1],
        parents=[-1] * len(token_ids),
    )


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("placeholder", [-1, -512])
def test_a_placeholder_is_seen_wherever_it_stands(place: int, placeholder: int) -> None:
    ids = [0, 255, 256, 1 << 30, LARGEST]
    assert not has_placeholders(of_ids(*ids))
    ids[place] = placeholder
    assert has_placeholders(of_ids(*ids))
    assert not has_placeholders(fill_in(of_ids(*ids), [7] * 512))


def test_a_step_without_tokens_has_none() -> None:
    message = pack_step(
        lens=[], starts=[], block_counts=[], token_ids=[], blocks=[], logit_rows=[], zero_blocks=[-1]
    )
    assert not has_placeholders(message)
