"""The tiny Llama that most cases use, with its reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cases.serving import Serving, serving
from tests.models.checkpoints import MARGIN, build, family, prompt_ids
from tests.models.oracle import Oracle
from tests.models.toy_tokenizers import byte_tokenizer

VOCAB_SIZE = 259


@dataclass(frozen=True)
class Tiny:
    """A perturbed checkpoint with a byte tokenizer."""

    folder: Path
    oracle: Oracle

    def prompt(self, length: int, num_tokens: int) -> list[int]:
        """A prompt whose greedy continuation has no near tie, so that exact equality may be asked for."""
        for seed in range(100):
            ids = prompt_ids(length, VOCAB_SIZE, seed=1000 * length + seed)
            if self.oracle.continuation(ids, num_tokens).margin >= MARGIN:
                return ids
        raise AssertionError(f"no prompt of {length} tokens without near ties")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = build(tmp_path_factory.mktemp("tiny"), family("llama"), vocab_size=VOCAB_SIZE)
    byte_tokenizer().save_pretrained(folder)
    return Tiny(folder, Oracle(folder))


@pytest.fixture(scope="session")
def tiny_server(tiny: Tiny) -> Iterator[Serving]:
    with serving(tiny.folder) as server:
        yield server
        server.idle()
