"""From the logits of a step to its results, slice by slice: sampled tokens, candidates of beam searches, and
scores of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from workers.decoding.beam_search import Candidate
from workers.engine.step import (
    GrammarFailed,
    Sampled,
    SampleTask,
    SequenceSlice,
    SliceResult,
    StepPlan,
    StepResult,
)
from workers.kernels import NOT_FINITE, Draw, Drawn, Kernels
from workers.runtime.candidates import find_candidates
from workers.runtime.logprobs import score_tokens
from workers.runtime.sampler import BEST, draw_of, sample
from workers.types import TokenLogprob

_NON_FINITE = SliceResult(error="the model produced a value that is not a finite number")


class StepResults(Protocol):
    """Takes the logit rows of a plan in the order of `step_codec.encode`, in one or several parts."""

    @property
    def draws(self) -> Sequence[Draw]:
        """How an id is to be drawn from each row, for `take`."""
        ...

    @property
    def ids_only(self) -> bool:
        """Whether `take` looks at no logits."""
        ...

    @property
    def has_trees(self) -> bool:
        """Whether a slice may have guesses whose keys and values have to move (`step_codec.encode_moves`)."""
        ...

    def take(self, drawn: Drawn) -> None:
        """The next rows. Reads them only."""
        ...

    def results(self) -> StepResult: ...


def results_of(plan: StepPlan, kernels: Kernels) -> StepResults:
    """Of a plan that is about to be computed."""
    for piece in plan.slices:
        takes_id_only = piece.sample is None or piece.sample.takes_id_only
        if not takes_id_only or piece.prompt_targets is not None:
            return ResultBuilder(plan, kernels)
    return IdResults(plan)


class IdResults:
    """Implements StepResults for steps of which ids are all that is wanted."""

    ids_only = True

    def __init__(self, plan: StepPlan) -> None:
        self._slices = plan.slices
        self.draws: list[Draw] = []
        self.has_trees = False
        for piece in plan.slices:
            if piece.num_drafts:
                self.draws += _draws_around(piece)
                self.has_trees |= piece.draft_parents is not None
            elif piece.sample is not None:
                self.draws.append(draw_of(piece.sample))
        self._ids: list[int] = []

    def take(self, drawn: Drawn) -> None:
        self._ids += drawn.ids

    def take_ids(self, ids: Sequence[int]) -> None:
        """As `take`, without the logits."""
        self._ids += ids

    def results(self) -> StepResult:
        assert len(self._ids) == len(self.draws), f"{len(self._ids)} ids for {len(self.draws)} rows"
        found, first = [], 0
        for piece in self._slices:
            if piece.num_drafts:
                ids = self._ids[first : first + piece.num_drafts + 1]
                first += len(ids)
                found.append(_of_ids(piece, ids))
            elif piece.sample is not None:
                found.append(_of_id(self._ids[first]))
                first += 1
            else:
                found.append(SliceResult())
        return StepResult(slices=found)


def _of_id(token_id: int) -> SliceResult:
    return _NON_FINITE if token_id == NOT_FINITE else SliceResult(sampled=(Sampled(token_id=token_id),))


def _of_ids(piece: SequenceSlice, token_ids: Sequence[int]) -> SliceResult:
    """Of a slice with guesses: what was sampled before and after each of them."""
    if NOT_FINITE in token_ids:
        return _NON_FINITE
    rows = _true_rows(piece, token_ids)
    kept = token_ids if piece.draft_parents is None else [token_ids[row] for row in rows]
    return SliceResult(sampled=tuple(Sampled(token_id=each) for each in kept), rows=rows)


def _draws_around(piece: SequenceSlice) -> list[Draw]:
    """How ids are drawn before and after each guess of a slice: as deep in the tree, alike."""
    assert piece.sample is not None, "guesses after which nothing is sampled"
    depths = [0]
    for index in range(piece.num_drafts):
        depths.append(1 + depths[index if piece.draft_parents is None else piece.draft_parents[index] + 1])
    draws = [draw_of(piece.sample, num_drafts) for num_drafts in range(max(depths) + 1)]
    return [draws[depth] for depth in depths]


def _true_rows(piece: SequenceSlice, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Of a tree, the rows along the guesses that came true, as in `SliceResult`; else ()."""
    if piece.draft_parents is None:
        return ()
    rows = [0]
    # A draft comes after the one that it follows.
    for row, (parent, draft) in enumerate(zip(piece.draft_parents, piece.drafts, strict=True), 1):
        if parent + 1 == rows[-1] and draft == token_ids[rows[-1]]:
            rows.append(row)
    return tuple(rows)


class _Use(NamedTuple):
    """What a row of logits is for: one of the two."""

    slice: int
    target: int | None  # a token to score
    task: SampleTask | None  # a token to sample, or candidates to find


class ResultBuilder:
    """Implements StepResults for any plan."""

    ids_only = False

    def __init__(self, plan: StepPlan, kernels: Kernels) -> None:
        self._plan = plan
        self._kernels = kernels
        self._uses: list[_Use] = []  # of each row
        self._draws: list[Draw] = []
        for index, piece in enumerate(plan.slices):
            for target in piece.prompt_targets or ():
                self._uses.append(_Use(index, target, None))
                self._draws.append(BEST)
            for task in piece.sample_tasks():
                self._uses.append(_Use(index, None, task))
                self._draws.append(draw_of(task))
        self._first_search = len(plan.slices) - plan.num_searches  # index of a slice
        self._taken = 0
        self._sampled: dict[int, list[Sampled]] = {}
        self._candidates: dict[int, tuple[Candidate, ...]] = {}
        self._scores: dict[int, list[TokenLogprob]] = {}
        self._errors: dict[int, SliceResult] = {}

    @property
    def draws(self) -> Sequence[Draw]:
        return self._draws

    @property
    def has_trees(self) -> bool:
        return any(piece.draft_parents is not None for piece in self._plan.slices)

    def take(self, drawn: Drawn) -> None:
        logits = drawn.logits
        uses = self._uses[self._taken : self._taken + logits.shape[0]]
        assert len(uses) == logits.shape[0], "more logit rows than the plan asks for"
        self._taken += len(uses)
        sampling = [row for row, use in enumerate(uses) if use.task is not None]
        if self._plan.num_searches:
            self._search(drawn, uses, [row for row in sampling if uses[row].slice >= self._first_search])
            sampling = [row for row in sampling if uses[row].slice < self._first_search]
            num_scored = sum(use.target is not None for use in uses)
        else:
            num_scored = len(uses) - len(sampling)
        self._sample(drawn, uses, sampling)
        if num_scored:
            self._score(logits, uses)

    def results(self) -> StepResult:
        assert self._taken == len(self._uses), "fewer logit rows than the plan asks for"
        return StepResult(slices=tuple(map(self._result, range(len(self._plan.slices)))))

    def _result(self, index: int) -> SliceResult:
        """Of the slice of this index."""
        if index in self._errors:
            return self._errors[index]
        sampled: Sequence[Sampled] = tuple(self._sampled.get(index, ()))
        rows: tuple[int, ...] = ()
        if sampled:
            rows = _true_rows(self._plan.slices[index], [each.token_id for each in sampled])
        return SliceResult(
            sampled=tuple(sampled[row] for row in rows) if rows else sampled,
            rows=rows,
            candidates=self._candidates.get(index, ()),
            prompt_logprobs=tuple(self._scores.get(index, ())),
        )

    def _sample(self, drawn: Drawn, uses: list[_Use], rows: list[int]) -> None:
        rows = [row for row in rows if self._is_free(uses[row])]
        if not rows:
            return
        slices = [uses[row].slice for row in rows]
        tasks = [task for row in rows if (task := uses[row].task) is not None]
        logits, ids = drawn.logits, drawn.ids
        if len(rows) < len(uses):
            logits, ids = logits[rows], [ids[row] for row in rows]
        chosen = sample(logits, ids, tasks, self._kernels)
        for index, found in zip(slices, chosen, strict=True):
            if found is None:
                self._errors[index] = _NON_FINITE
            else:
                self._sampled.setdefault(index, []).append(found)

    def _search(self, drawn: Drawn, uses: list[_Use], rows: list[int]) -> None:
        if not rows:
            return
        tasks = [task for row in rows if (task := uses[row].task) is not None]
        found = find_candidates(drawn.logits[rows], [drawn.ids[row] for row in rows], tasks)
        for row, candidates in zip(rows, found, strict=True):
            if candidates is None:
                self._errors[uses[row].slice] = _NON_FINITE
            else:
                self._candidates[uses[row].slice] = candidates

    def _is_free(self, use: _Use) -> bool:
        """Whether a token may be sampled: always, unless the grammar of the answer cannot go on. After
        guesses that is no error: the answer ends only if it comes there by itself."""
        if use.task is not None and use.task.allowed is not None:
            try:
                use.task.allowed.bits(len(use.task.drafts))
            except GrammarFailed as error:
                if not use.task.drafts:
                    self._errors[use.slice] = SliceResult(error=str(error), error_code=error.code)
                return False
        return True

    def _score(self, logits: torch.Tensor, uses: list[_Use]) -> None:
        by_slice: dict[int, list[int]] = {}
        for row, use in enumerate(uses):
            if use.target is not None:
                by_slice.setdefault(use.slice, []).append(row)
        for index, rows in by_slice.items():
            targets = [target for row in rows if (target := uses[row].target) is not None]
            num_top = self._plan.slices[index].num_prompt_logprobs
            # The rows of a slice lie side by side.
            for score in score_tokens(logits[rows[0] : rows[-1] + 1], targets, num_top):
                if score is None:
                    self._errors[index] = _NON_FINITE
                else:
                    self._scores.setdefault(index, []).append(score)
