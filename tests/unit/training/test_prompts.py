from __future__ import annotations

import pytest

from workers.training import prompts
from workers.training.prompts import Part, make_prompts


def test_the_same_seed_makes_the_same_prompts() -> None:
    made = make_prompts(200, 3)
    assert made == make_prompts(200, 3)
    assert made != make_prompts(200, 4)
    assert len({prompt.text for prompt in made}) == len(made)


def test_a_tenth_is_held_out_and_the_questions_follow() -> None:
    parts = [prompt.part for prompt in make_prompts(200, 0)]
    assert [number for number, part in enumerate(parts) if part is Part.HELD_OUT] == list(range(9, 200, 10))
    assert set(parts[200:]) == {Part.QUESTIONS}
    assert parts.count(Part.QUESTIONS) == 24


def test_parts_share_no_topic() -> None:
    topics = prompts._list(prompts._TOPICS)
    held_out = prompts._list(prompts._HELD_OUT_TOPICS)
    assert len({*topics, *held_out}) == len(topics) + len(held_out)
    assert all(entry and "\n" not in entry for entry in (*topics, *held_out))


@pytest.mark.parametrize("count", [0, -1])
def test_no_prompts_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_prompts(count, 0)


def test_more_prompts_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_make", lambda stock, draw: "Hello")
    with pytest.raises(ValueError, match="2 prompts are asked for: there are about 1 different ones"):
        make_prompts(2, 0)
