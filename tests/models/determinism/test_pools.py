"""Groups of different sizes that read each other's blocks: the answers of one rank alone, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.checkpoints import prompt_ids
from tests.models.determinism.covering import Cell, covering
from tests.models.determinism.grid import PROMPTS, SAMPLINGS, Form, Grid
from tests.models.draft_folders import random_heads
from tests.models.engine_groups import GREEDY, group_config
from tests.models.exchange_groups import ForeignMember, Loop, Member, Ranks, through
from workers.config import SpeculativeConfig
from workers.types import BegunChoice

CHUNKS = {1: None, 2: 7, 4: 16}  # by size of the group
SIDES = {
    "prefill": (1, 2, 4),
    "decode": (1, 2, 4),
    "prompt": (1, 2, 3),
    "sampling": ("greedy", "seeded", "penalties"),
    "choices": (1, 3),
    "begun": (0, 9),
    "prefix": ("none", "partial page"),
    "mates": (0, 3, 7),
}
NUM_CELLS = {
    Form("float32"): 40,
    Form("bfloat16"): 40,
    Form("bfloat16", "int8", "int8"): 40,
    Form("bfloat16", "int4"): 20,
}


def is_legal(cell: Cell) -> bool:
    return cell["prefill"] != cell["decode"]


def check(grid: Grid, members: dict[int, Member], cell: Any, form: Form, number: int) -> None:
    """One request: its prompt is read in one pool, or the whole is begun there, and the other answers."""
    prefill, decode, salt = members[cell["prefill"]], members[cell["decode"]], f"cell {number}"
    prompt, sampling = PROMPTS[cell["prompt"]], SAMPLINGS[cell["sampling"]]
    choices, num_begun = cell["choices"], cell["begun"]
    wanted = grid.expected(form, cell["prompt"], cell["sampling"], choices)
    if cell["prefix"] != "none":
        decode.answer(decode.submit(prompt[: len(prompt) // 2], replace(GREEDY, max_tokens=1), salt=salt))
    rng = random.Random(number)
    mates = [
        decode.submit(prompt_ids(rng.randint(1, 60), seed=300 + mate), replace(GREEDY, max_tokens=12))
        for mate in range(cell["mates"])
    ]
    if num_begun:
        part = replace(sampling, max_tokens=num_begun)
        first = prefill.submit(prompt, part, num_choices=choices, salt=salt)
        begun = []
        for choice in range(choices):
            answer = prefill.answer(first, choice)
            assert answer.token_ids == wanted[choice].token_ids[:num_begun], cell
            assert answer.logprobs == wanted[choice].logprobs[:num_begun], cell
            begun.append(BegunChoice(choice=choice, token_ids=tuple(answer.token_ids)))
        request_id = decode.submit(
            prompt, sampling, num_choices=choices, salt=salt, source=prefill.source(), begun=tuple(begun)
        )
    else:
        request_id = through(prefill, decode, prompt, sampling, num_choices=choices, salt=salt)
    for choice in range(choices):
        answer = decode.answer(request_id, choice)
        assert answer.token_ids == wanted[choice].token_ids[num_begun:], cell
        assert answer.logprobs == wanted[choice].logprobs[num_begun:], cell
    for mate in mates:
        decode.answer(mate)


@pytest.mark.parametrize("form", NUM_CELLS, ids=str)
@pytest.mark.determinism
def test_two_pools_give_the_answer_of_one_rank(
    loop: Loop, ranks: Ranks, family_folder: Callable[[str], Path], tmp_path: Path, form: Form
) -> None:
    folder = family_folder("llama")
    grid = Grid(folder, random_heads(tmp_path / "heads"))
    cells = covering(SIDES, strength=2, least=NUM_CELLS[form], seed=2, is_legal=is_legal)
    members: dict[int, Member] = {}
    try:
        for size, chunk in CHUNKS.items():
            config = group_config(
                folder,
                size,
                dtype=form.dtype,
                quantization=form.weights,
                kv_dtype=form.kv,
                speculative=SpeculativeConfig(method="prompt_lookup" if size == 2 else "none"),
            )
            config = replace(config, schedule=replace(config.schedule, max_prefill_chunk=chunk))
            members[size] = ForeignMember(loop, f"{'-'.join(form)}-{size}", config, ranks)
        for number, cell in enumerate(cells):
            check(grid, members, cell, form, number)
        for member in members.values():
            member.wait_for("rest", active_blocks=0, kv_leases=0, kv_fetches_lost_total=0)
            assert member.stats.kv_fetched_tokens_total > 0
    finally:
        for member in members.values():
            member.close()
        grid.close()
