from __future__ import annotations

import torch

from tests.unit.training.material_maker import make_material
from workers.training.material import frequent_tokens, lessons_of
from workers.training.prompts import Part
from workers.training.writing import Text


def _text(part: Part, *answer_ids: int) -> Text:
    return Text(number=0, part=part, prompt_ids=(9, 9, 9), answer_ids=answer_ids)


def test_the_most_frequent_tokens_of_training_answers() -> None:
    texts = [
        _text(Part.TRAINING, 7, 7, 7, 7, 5, 5, 9),
        _text(Part.TRAINING, 9, 5, 4, 9),
        _text(Part.HELD_OUT, 8, 8, 8, 8, 8),
    ]
    assert frequent_tokens(texts, 2, 12).tolist() == [5, 7]  # of 5 and 9, three times each, the smaller
    assert frequent_tokens(texts, 5, 12).tolist() == [0, 1, 5, 7, 9]  # 4 came once: that tells nothing
    assert frequent_tokens(texts, 100, 12).tolist() == list(range(12))


def test_rows_and_coverage_of_a_part() -> None:
    material = make_material()
    assert material.of(Part.HELD_OUT) == [12, 13, 14]
    assert material.rows_of(Part.HELD_OUT).tolist() == list(range(240, 300))
    assert material.coverage(Part.HELD_OUT) == 1.0
    assert material.rows_of(Part.QUESTIONS).tolist() == []
    assert material.evaluated == [Part.HELD_OUT]  # nothing is said of a part without texts


def test_lessons_are_the_likely_tokens_of_the_target() -> None:
    material = make_material()
    lessons = lessons_of(material)
    assert torch.equal(lessons.places[:, 0], material.answers)
    assert torch.allclose(lessons.shares.sum(dim=1), torch.ones(len(material.answers)))
