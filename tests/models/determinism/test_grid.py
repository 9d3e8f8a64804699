"""One answer in every circumstance: token ids and log-probabilities to the bit.

The first cells hold every pair of circumstances and run always; `make test-determinism` runs all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from tests.models.determinism.controls import own_scales, rank_by_rank, torch_products
from tests.models.determinism.covering import covering
from tests.models.determinism.grid import PROMPTS, SIDES, Cell, Form, Grid, is_legal
from tests.models.determinism.numpy_model import NumpyModel
from tests.models.determinism.thread_ranks import KernelSet
from tests.models.draft_folders import random_heads

NUM_CELLS = 440
ALL = covering(SIDES, strength=2, least=NUM_CELLS, seed=1, is_legal=is_legal)
PAIRS = covering(SIDES, strength=2, least=0, seed=1, is_legal=is_legal)
Folders = Callable[[str], Path]
MakeGrid = Callable[[KernelSet], Grid]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_heads(tmp_path_factory.mktemp("heads") / "random")


@pytest.fixture(scope="module")
def grid(family_folder: Folders, heads: Path) -> Iterator[Grid]:
    grid = Grid(family_folder("llama"), heads)
    yield grid
    grid.close()


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.determinism] * (n >= len(PAIRS))) for n in range(len(ALL))],
)
def test_an_answer_is_that_of_the_request_alone(grid: Grid, number: int) -> None:
    cell = Cell(**ALL[number])  # type: ignore[arg-type]
    assert grid.differs(cell, seed=number) is None, cell


@pytest.mark.parametrize(
    ("kernels", "form"),
    [
        (rank_by_rank, Form("float32")),
        (torch_products, Form("float32")),
        (rank_by_rank, Form("bfloat16", "int8")),
        (rank_by_rank, Form("bfloat16", "int4")),
        (own_scales, Form("bfloat16", "int8")),
    ],
)
def test_other_sums_are_noticed(family_folder: Folders, heads: Path, kernels: KernelSet, form: Form) -> None:
    grid = Grid(family_folder("llama"), heads, kernels)
    wanted = {"dtype": form.dtype, "weights": form.weights}
    cells = [Cell(**cell) for cell in ALL if wanted.items() <= cell.items()]  # type: ignore[arg-type]
    assert any(grid.differs(cell, seed=number) for number, cell in enumerate(cells[:12]))
    grid.close()


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_numpy_says_the_same(grid: Grid, family_folder: Folders, prompt: int) -> None:
    """Log-probabilities of the best and of all that were told, and the best itself where it is clear."""
    (answer,) = grid.expected(Form("float32"), prompt, "greedy", 1)
    model = NumpyModel(family_folder("llama"))
    tokens = [*PROMPTS[prompt], *answer.token_ids]
    scores = torch.from_numpy(model.logprobs(tokens))[len(PROMPTS[prompt]) - 1 : -1]
    for row, token_id, told in zip(scores, answer.token_ids, answer.logprobs, strict=True):
        best = row.topk(2).values
        assert best[0] - best[1] < 1e-3 or int(row.argmax()) == token_id
        for other, logprob in (*told.top, (token_id, told.logprob)):
            assert logprob == pytest.approx(float(row[other]), abs=1e-4)


def test_every_pair_of_circumstances_is_there() -> None:
    for (one, ones), (two, twos) in combinations(SIDES.items(), 2):
        wanted = {
            pair for pair in product(ones, twos) if (one, two) != ("batch", "memory") or _is_quick(*pair)
        }
        if {one, two} == {"sampling", "begun"}:
            wanted -= {("scored prompt", 1), ("scored prompt", 9)}
        assert {(cell[one], cell[two]) for cell in PAIRS} == wanted, (one, two)
    assert ALL[: len(PAIRS)] == PAIRS and len({tuple(cell.values()) for cell in ALL}) >= NUM_CELLS


def _is_quick(batch: object, memory: object) -> bool:
    return memory == "plenty" or batch not in (16, 32)
