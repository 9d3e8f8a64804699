"""Medusa heads on rank 0: they read the last hidden states of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from time import perf_counter

import torch

from workers.decoding.guess_tree import best_tree
from workers.engine.proposals import HeadTask, Pass, Proposals
from workers.engine.step import StepPlan
from workers.kernels import MAX_LOGIT_ROWS
from workers.model.medusa import MedusaHeads
from workers.runtime.device import ends_the_group

_BRANCHES = 4  # tokens of a head that a tree may hold


class MedusaRunner:
    """Implements `workers.engine.proposals.DraftHeads`."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._plan: StepPlan | None = None
        self._hidden: torch.Tensor | None = None  # (rows of logits, hidden) of that step

    @property
    def num_heads(self) -> int:
        return len(self._heads.layers)

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
        most = min(self.num_heads, max(task.num_drafts for task in tasks))
        ids = self._heads.token_ids
        places: list[list[list[int]]] = []  # of each task and head, the best first
        values: list[list[list[float]]] = []
        for hidden in torch.split(self._hidden[rows], max(1, MAX_LOGIT_ROWS // most)):
            chances = self._heads.logits(hidden, most).log_softmax(-1)  # (some tasks, heads, V')
            best = chances.topk(min(_BRANCHES, len(ids)))
            places += best.indices.tolist()
            values += best.values.tolist()
        trees, is_broken = [], False
        for task, heads, scores in zip(tasks, places, values, strict=True):
            levels = [
                [(ids[place], score) for place, score in zip(*pair, strict=True)]
                for pair in zip(heads, scores, strict=True)
            ]
            if not all(isfinite(level[0][1]) for level in levels):
                levels, is_broken = [], True
            elif task.is_chain:
                levels = [level[:1] for level in levels]
            trees.append(best_tree(levels, task.num_drafts))
        return Proposals(
            [tree.token_ids for tree in trees],
            (Pass(len(tasks), perf_counter() - began),),
            [None if task.is_chain else tree.parents for task, tree in zip(tasks, trees, strict=True)],
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
