"""The embedded model, converted from the installed package."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from cluster.models.manifest import sha256_file
from workers.model.checkpoint import Checkpoint


def test_it_is_the_one_that_was_compared_with_transformers(embedded_folder: Path) -> None:
    """With this hash all 272 tensors equalled transformers' own dequantised ones, rounded to bfloat16."""
    assert sha256_file(embedded_folder / "model.safetensors") == (
        "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
    )
    tokenizer = Tokenizer.from_file(str(embedded_folder / "tokenizer.json"))
    assert tokenizer.encode("Hello 1234 world").ids == [19556, 216, 33, 34, 35, 36, 905]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]
    checkpoint = Checkpoint(embedded_folder)
    assert (checkpoint.vocab_size, checkpoint.max_model_len, checkpoint.eos_token_ids) == (49152, 8192, (2,))
