"""Material of a made-up target with 16 hidden values and 40 tokens, whose texts can be guessed."""

from __future__ import annotations

import torch

from workers.training.material import Material
from workers.training.prompts import Part
from workers.training.states import row_starts
from workers.training.writing import Text

HIDDEN, VOCAB = 16, 40
PARTS = [Part.TRAINING] * 12 + [Part.HELD_OUT] * 3


def make_material(seed: int = 0) -> Material:
    """Texts count upwards by 1 or 2 from a number of their own; a state is the head's row of its token and of
    the one behind it, so that a head can find the second one."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=generator), dim=1)
    texts = []
    for number, part in enumerate(PARTS):
        stride = 1 + number % 2
        ids = [(number + stride * place) % VOCAB for place in range(24)]
        texts.append(Text(number=number, part=part, prompt_ids=tuple(ids[:4]), answer_ids=tuple(ids[4:])))
    answers = torch.tensor([token_id for text in texts for token_id in text.answer_ids])
    stride_of = torch.tensor([1 + text.number % 2 for text in texts for _ in text.answer_ids])
    states = 8 * rows[answers] + 4 * rows[(answers + stride_of) % VOCAB]
    return Material(
        target_hash="0" * 64,
        target_bytes=VOCAB * HIDDEN * 2,
        texts=texts,
        starts=row_starts(texts),
        states=states.bfloat16(),
        draft_token_ids=torch.arange(VOCAB),
        head=rows.bfloat16(),
        embedding=rows.bfloat16(),
        answers=answers,
    )
