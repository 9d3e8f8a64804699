"""From the logits of a step to its results: sampled tokens and scores of prompt tokens, slice by slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.step import Sampled, SampleTask, SliceResult, StepPlan, StepResult
from workers.kernels import Draw, Drawn, Kernels
from workers.runtime.logprobs import score_tokens
from workers.runtime.sampler import BEST, draw_of, sample
from workers.types import TokenLogprob

_NON_FINITE = "the model produced a value that is not a finite number"


class ResultBuilder:
    """Takes the logit rows of a plan in the order of `step_codec.encode`, in one or several parts."""

    def __init__(self, plan: StepPlan, kernels: Kernels) -> None:
        self._plan = plan
        self._kernels = kernels
        # Of each row: its slice, and the token to score; None: the row is sampled from.
        self._uses: list[tuple[int, int | None]] = []
        self._draws: list[Draw] = []
        for index, piece in enumerate(plan.slices):
            for target in piece.prompt_targets or ():
                self._uses.append((index, target))
                self._draws.append(BEST)
            if piece.sample is not None:
                self._uses.append((index, None))
                self._draws.append(draw_of(piece.sample))
        self._taken = 0
        self._sampled: dict[int, Sampled] = {}
        self._scores: dict[int, list[TokenLogprob]] = {}
        self._errors: dict[int, str] = {}

    @property
    def draws(self) -> Sequence[Draw]:
        """How an id is to be drawn from each row, for `take`."""
        return self._draws

    def take(self, drawn: Drawn) -> None:
        """The next rows. Reads them only."""
        logits = drawn.logits
        uses = self._uses[self._taken : self._taken + logits.shape[0]]
        assert len(uses) == logits.shape[0], "more logit rows than the plan asks for"
        self._taken += len(uses)
        sampling = [row for row, (_, target) in enumerate(uses) if target is None]
        self._sample(drawn, uses, sampling)
        if len(sampling) < len(uses):
            self._score(logits, uses)

    def results(self) -> StepResult:
        assert self._taken == len(self._uses), "fewer logit rows than the plan asks for"
        return StepResult(
            slices=tuple(
                SliceResult(error=self._errors[index])
                if index in self._errors
                else SliceResult(
                    sampled=self._sampled.get(index), prompt_logprobs=tuple(self._scores.get(index, ()))
                )
                for index in range(len(self._plan.slices))
            )
        )

    def _sample(self, drawn: Drawn, uses: list[tuple[int, int | None]], rows: list[int]) -> None:
        if not rows:
            return
        slices = [uses[row][0] for row in rows]
        tasks: list[SampleTask] = []
        for index in slices:
            task = self._plan.slices[index].sample
            assert task is not None
            tasks.append(task)
        logits, ids = drawn
        if len(rows) < len(uses):
            logits, ids = logits[rows], [ids[row] for row in rows]
        chosen = sample(logits, ids, tasks, self._kernels)
        for index, found in zip(slices, chosen, strict=True):
            if found is None:
                self._errors[index] = _NON_FINITE
            else:
                self._sampled[index] = found

    def _score(self, logits: torch.Tensor, uses: list[tuple[int, int | None]]) -> None:
        by_slice: dict[int, list[int]] = {}
        for row, (index, target) in enumerate(uses):
            if target is not None:
                by_slice.setdefault(index, []).append(row)
        for index, rows in by_slice.items():
            targets = [target for row in rows if (target := uses[row][1]) is not None]
            num_top = self._plan.slices[index].num_prompt_logprobs
            # The rows of a slice lie side by side.
            for score in score_tokens(logits[rows[0] : rows[-1] + 1], targets, num_top):
                if score is None:
                    self._errors[index] = _NON_FINITE
                else:
                    self._scores.setdefault(index, []).append(score)
