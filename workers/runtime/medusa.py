"""Medusa heads on rank 0: they read the last hidden states of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from time import perf_counter

import torch

from workers.decoding.guess_tree import GrowingTree
from workers.engine.proposals import HeadTask, Pass, Proposals
from workers.engine.step import StepPlan
from workers.kernels import GuessTask
from workers.model.medusa import MedusaHeads
from workers.runtime.device import ends_the_group

# Log-probabilities below which a token is not worth asking the next head what follows, which takes a tenth of
# a step of one sequence, nor worth being checked, which takes a thirtieth.
_FOLLOWED = log(0.3)
_CHECKED = log(0.04)


class MedusaRunner:
    """Implements `workers.engine.proposals.DraftHeads`."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._plan: StepPlan | None = None
        self._hidden: torch.Tensor | None = None  # (rows of logits, hidden) of that step

    @property
    def num_heads(self) -> int:
        return len(self._heads.model.heads)

    def keep(self, plan: StepPlan, hidden: torch.Tensor | None) -> None:
        """The last hidden states of a step, valid until the next; None: not all of them are there."""
        self._plan, self._hidden = plan, hidden

    def propose(self, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        """Raises GroupFailed when the device cannot compute any more."""
        with ends_the_group("guessing by heads"):
            return self._propose(step_number, tasks)

    def _propose(self, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        none = Proposals([()] * len(tasks))
        if self._plan is None or self._hidden is None or self._plan.number != step_number:
            return none
        began = perf_counter()
        firsts = _first_rows(self._plan)
        rows = [firsts[task.slice] + task.row for task in tasks if task.slice < len(firsts)]
        if len(rows) < len(tasks) or max(rows) >= len(self._hidden):  # slices were computed one by one
            return none
        wanted = [
            GuessTask(row, task.token_id, task.num_drafts, task.is_chain)
            for row, task in zip(rows, tasks, strict=True)
        ]
        trees = [GrowingTree(task.num_drafts) for task in tasks]
        is_broken = False
        for task, tree, levels in zip(
            tasks, trees, self._heads(self._hidden, wanted, _FOLLOWED), strict=True
        ):
            if levels is None:
                is_broken = True
                continue
            for tokens in levels:
                tree.grow(tokens[:1] if task.is_chain else tokens)
            tree.add_chain(*task.copied)
        found = [tree.likeliest(_CHECKED) for tree in trees]
        return Proposals(
            [tree.token_ids for tree in found],
            (Pass(len(tasks), perf_counter() - began),),
            [None if task.is_chain else tree.parents for task, tree in zip(tasks, found, strict=True)],
            is_broken,
        )


def _first_rows(plan: StepPlan) -> list[int]:
    """Of each slice, the row of logits after which its first token is sampled (`step_codec.encode`)."""
    firsts, row = [], 0
    for piece in plan.slices:
        row += len(piece.prompt_targets or ())
        firsts.append(row)
        row += 0 if piece.sample is None else 1 + piece.num_drafts
    return firsts
