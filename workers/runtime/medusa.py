"""Medusa heads on rank 0: they read the last hidden states of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from workers.engine.proposals import HeadTask, Pass, Proposals
from workers.engine.step import StepPlan
from workers.kernels import NOT_FINITE
from workers.model.medusa import MedusaHeads
from workers.runtime.sampler import BEST


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
        none = Proposals([()] * len(tasks))
        if self._plan is None or self._hidden is None or self._plan.number != step_number:
            return none
        began = perf_counter()
        firsts = _first_rows(self._plan)
        if any(task.slice >= len(firsts) for task in tasks):  # the slices were computed one by one
            return none
        rows = torch.tensor([firsts[task.slice] + task.row for task in tasks], device=self._hidden.device)
        most = max(task.num_drafts for task in tasks)
        logits = self._heads.logits(self._hidden[rows], most).flatten(0, 1)
        ids = self._heads.kernels.draw(logits, [BEST] * len(logits), only_finite=True)
        drafts = [
            self._tokens(ids[place * most : place * most + task.num_drafts])
            for place, task in enumerate(tasks)
        ]
        return Proposals(drafts, (Pass(len(tasks), perf_counter() - began),))

    def _tokens(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Up to the first that came from values that are not finite."""
        known = ids[: ids.index(NOT_FINITE)] if NOT_FINITE in ids else ids
        return tuple(self._heads.token_ids[each] for each in known)


def _first_rows(plan: StepPlan) -> list[int]:
    """Of each slice, the row of logits after which its first token is sampled (`step_codec.encode`)."""
    firsts, row = [], 0
    for piece in plan.slices:
        row += len(piece.prompt_targets or ())
        firsts.append(row)
        row += 0 if piece.sample is None else 1 + piece.num_drafts
    return firsts
