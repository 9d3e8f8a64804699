"""Steps of which ids are all that is wanted have results of their own: the same as those of any plan."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tests.unit.runtime.factories import GREEDY, RANDOM, piece, task
from workers.engine.step import SequenceSlice, StepPlan, StepResult
from workers.kernels import NOT_FINITE, Drawn, kernels_for
from workers.runtime.results import IdResults, ResultBuilder, StepResults, results_of

VOCAB_SIZE = 50
_DRAFT_IDS = 3  # few, so that some come true
KERNELS = kernels_for(torch.device("cpu"), torch.float32)


def _plan(draw: random.Random) -> StepPlan:
    slices: list[SequenceSlice] = []
    for block in range(draw.randint(1, 9)):
        sample = task(draw.choice([GREEDY, RANDOM]), output=[5] * draw.randint(0, 3), choice=block)
        is_sampled = block == 0 or draw.random() < 0.7
        token_ids = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 4))]
        chosen = replace(sample, takes_id_only=True) if is_sampled else None
        slices.append(piece(token_ids, blocks=[block], sample=chosen))
        if is_sampled and draw.random() < 0.5:
            num_drafts = draw.randint(1, 4)
            drafts = [draw.randrange(_DRAFT_IDS) for _ in range(num_drafts)]
            parents = [draw.randint(-1, index - 1) for index in range(num_drafts)]
            slices[-1].token_ids = token_ids + drafts
            slices[-1].num_drafts = num_drafts
            slices[-1].draft_parents = parents if draw.random() < 0.7 else None
    return StepPlan(number=1, slices=slices)


def _results(of: StepResults, draw: random.Random, logits: torch.Tensor) -> StepResult:
    """Of all rows, which come in two parts."""
    ids = KERNELS.draw(logits, of.draws, only_finite=True)
    cut = draw.randint(0, len(ids))
    for part in (slice(0, cut), slice(cut, len(ids))):
        of.take(Drawn(logits[part], ids[part]))
    return of.results()


def test_ids_alone_and_any_results_are_the_same() -> None:
    num_broken = num_right = 0
    for seed in range(200):
        draw = random.Random(seed)
        plan = _plan(draw)
        own, other = results_of(plan, KERNELS), ResultBuilder(plan, KERNELS)
        assert isinstance(own, IdResults)
        assert list(own.draws) == list(other.draws)
        assert own.has_trees == other.has_trees
        logits = torch.randn(len(own.draws), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        logits[:, :_DRAFT_IDS] += 4
        logits[draw.randrange(len(logits)), 3] = draw.choice([0.0, float("nan")])
        found = [each.slices for each in (_results(own, draw, logits), _results(other, draw, logits))]
        for mine, theirs in zip(*found, strict=True):
            assert mine == replace(theirs, sampled=tuple(theirs.sampled))
            num_broken += mine.error is not None
            num_right += len(mine.rows) > 1
    assert num_broken > 20 and num_right > 20


def test_ids_that_come_later_are_the_same() -> None:
    plan = _plan(random.Random(7))
    at_once, later = IdResults(plan), IdResults(plan)
    ids = [NOT_FINITE, *range(len(at_once.draws) - 1)]
    at_once.take(Drawn(torch.empty(len(ids), 0), ids))
    later.take_ids(ids)
    assert at_once.results() == later.results()


def test_whoever_wants_more_than_ids_gets_it() -> None:
    plain = replace(task(), takes_id_only=True)
    several = piece([1], blocks=[0], sample=plain)
    for other in (
        piece([2], blocks=[1], sample=task(num_logprobs=1)),
        piece([2, 3], blocks=[1], sample=plain, targets=[3, 4]),
        replace(piece([2, 3], blocks=[1], sample=task(num_logprobs=1)), num_drafts=1),
    ):
        plan = StepPlan(number=1, slices=[several, other])
        assert isinstance(results_of(plan, KERNELS), ResultBuilder)
