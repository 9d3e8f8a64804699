"""What 8 and 4 bits cost the embedded model on a fixed text, of weights, and of keys and values.

Longer texts are in benchmarks/NOTES.md.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.models.loading import logits_of, paged_model
from workers.kernels import Quantization
from workers.quantizing.quality import passage_ids

FORMS = [Quantization.NONE, Quantization.INT8, Quantization.INT4]
# The Declaration of Independence, 1776.
TEXT = (
    "When in the Course of human events, it becomes necessary for one people to dissolve the political "
    "bands which have connected them with another, and to assume among the powers of the earth, the "
    "separate and equal station to which the Laws of Nature and of Nature's God entitle them, a decent "
    "respect to the opinions of mankind requires that they should declare the causes which impel them to "
    "the separation. Prudence, indeed, will dictate that Governments long established should not be "
    "changed for light and transient causes; and accordingly all experience hath shewn, that mankind are "
    "more disposed to suffer, while evils are sufferable, than to right themselves by abolishing the "
    "forms to which they are accustomed. But when a long train of abuses and usurpations, pursuing "
    "invariably the same Object evinces a design to reduce them under absolute Despotism, it is their "
    "right, it is their duty, to throw off such Government, and to provide new Guards for their future "
    "security. Such has been the patient sufferance of these Colonies; and such is now the necessity "
    "which constrains them to alter their former Systems of Government."
)


def perplexity(
    folder: Path, token_ids: list[int], form: Quantization, kv_dtype: torch.dtype | None = None
) -> float:
    model = paged_model(folder, dtype=torch.bfloat16, quantization=form, kv_dtype=kv_dtype)
    logits = logits_of(model, token_ids)
    scores = torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(token_ids[1:])[:, None])
    return math.exp(-float(scores.mean()))


def test_perplexity_of_the_embedded_model(embedded_folder: Path) -> None:
    token_ids = Tokenizer.from_file(str(embedded_folder / "tokenizer.json")).encode(TEXT).ids
    plain, int8, int4 = (perplexity(embedded_folder, token_ids, form) for form in FORMS)
    # 19.80, 20.79 and 19.87 on these 222 tokens, which the model half knows by heart; over 3,447 tokens of
    # six other texts int8 costs 0.6 % and int4 0.5 %. Its layers come from 4 bits: int4 holds them exactly.
    assert 19 < plain < 20.6
    assert int8 / plain < 1.06
    assert int4 / plain < 1.03


def test_keys_and_values_in_8_bits(embedded_folder: Path) -> None:
    """Over 1,708 tokens: on the 222 above chance alone moves it by 3 %, mostly down."""
    token_ids = passage_ids(embedded_folder)
    assert token_ids is not None
    plain, cached = (
        perplexity(embedded_folder, token_ids, Quantization.NONE, kv_dtype) for kv_dtype in (None, torch.int8)
    )
    assert cached / plain == pytest.approx(1.0, abs=0.005)
