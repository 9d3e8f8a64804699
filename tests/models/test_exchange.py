"""Two groups for one request: one computes the prompt, the other reads its blocks and answers as one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.checkpoints import prompt_ids
from tests.models.engine_groups import group_config
from tests.models.exchange_groups import LocalMember, Loop, through


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("long")

    def of(name: str) -> Path:
        place = root / name
        if not place.exists():
            key = "n_positions" if name == "gpt2" else "max_position_embeddings"
            checkpoints.build(place, checkpoints.family(name), **{key: 512})
        return place

    return of


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_thin(loop: Loop, folder: Callable[[str], Path], sizes: tuple[int, int]) -> None:
    prefill = LocalMember(loop, "prefill", group_config(folder("llama"), sizes[0]))
    decode = LocalMember(loop, "decode", group_config(folder("llama"), sizes[1]))
    prompt = prompt_ids(200)
    alone = decode.answer(decode.submit(prompt, salt="alone"))
    answer = decode.answer(through(prefill, decode, prompt))
    assert answer.token_ids == alone.token_ids
    assert answer.num_cached == 192
    prefill.wait_for("end", active_blocks=0, kv_leases=0)
    decode.wait_for("end", active_blocks=0, kv_fetches_total=1)
    decode.close()
    prefill.close()
