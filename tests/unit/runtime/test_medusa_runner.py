"""Which rows of a step the heads look at, and when they have nothing to look at."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch

from workers.decoding.copies import Copied
from workers.engine.proposals import HeadTask
from workers.engine.step import GroupFailed, SampleTask, SequenceSlice, StepPlan
from workers.kernels import GuessHead, GuessModel, PackedLinear, TorchKernels
from workers.model.medusa import MedusaHeads
from workers.runtime.medusa import MedusaRunner
from workers.types import SamplingParams

SIZE = 8  # hidden, and tokens that are guessed: 10 times their number
OTHER = 5  # a token that is not
SAMPLE = SampleTask(
    params=SamplingParams(max_tokens=9), choice=0, prompt_token_ids=(1, 2, 3), output_token_ids=()
)
PLAN = StepPlan(
    number=7,
    slices=(
        SequenceSlice(token_ids=(5, 6, 7), start=0, block_table=(0,), sample=SAMPLE, num_drafts=2),
        SequenceSlice(token_ids=(5, 6), start=0, block_table=(1,)),
        SequenceSlice(token_ids=(1, 2, 3), start=0, block_table=(2,), sample=SAMPLE, prompt_targets=(2, 3)),
    ),
)


@pytest.fixture
def runner() -> MedusaRunner:
    """Of two heads: the first says the token after the sampled one, or where that is another than the guessed
    ones the token of the state's largest element; the second says the one after the first's."""
    kernels, one = TorchKernels(), torch.eye(SIZE)
    of_token, none = 50 * one.roll(1, 1), 0 * one
    state, out = (kernels.pack_linear(each, None, torch.float32) for each in (none, one))
    model = GuessModel(
        heads=tuple(
            GuessHead(state=state, tokens=torch.cat((tokens, none[:1])), out=out)
            for tokens in (of_token, 2 * of_token)
        ),
        vocabulary=kernels.pack_linear(one, None, torch.float32),
        token_ids=tuple(range(0, 10 * SIZE, 10)),
        vocab_size=10 * SIZE,
    )
    return MedusaRunner(MedusaHeads(model))


def with_vocabulary(heads: MedusaHeads, product: PackedLinear) -> MedusaHeads:
    return replace(heads, model=replace(heads.model, vocabulary=product))


def rows(*largest: int) -> torch.Tensor:
    return 8 * torch.eye(SIZE)[list(largest)]


def test_a_task_names_a_row_by_its_slice(runner: MedusaRunner) -> None:
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5))  # three sampled | two scored and one sampled
    tasks = [HeadTask(0, 0, OTHER, 2, True), HeadTask(0, 2, OTHER, 2, True), HeadTask(2, 0, OTHER, 1, True)]
    proposals = runner.propose(7, tasks)
    assert proposals.drafts == [(0, 10), (20, 30), (50,)]
    assert proposals.parents == [None] * 3 and not proposals.is_broken
    assert [each.num_rows for each in proposals.passes] == [3]


def test_heads_see_the_token_that_was_sampled(runner: MedusaRunner) -> None:
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5))
    tasks = [HeadTask(0, 0, 40, 2, True), HeadTask(0, 1, 70, 2, True)]
    assert runner.propose(7, tasks).drafts == [(50, 60), (0, 10)]


def test_a_tree_holds_the_likeliest_and_nothing_unlikely(runner: MedusaRunner) -> None:
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5))
    sure = runner.propose(7, [HeadTask(0, 1, OTHER, 5)])
    assert (sure.drafts, sure.parents) == ([(10, 20)], [(-1, 0)])
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5) / 4)  # 0.51 for the best, 0.07 for each other
    (drafts,), (parents,) = (runner.propose(7, [HeadTask(0, 1, OTHER, 5)])[place] for place in (0, 2))
    assert drafts[:2] == (10, 20) and len(set(drafts)) == 5 and parents == (-1, 0, -1, -1, -1)
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5) / 16)  # 0.19: nobody asks what comes after it
    assert runner.propose(7, [HeadTask(0, 1, OTHER, 5)]).parents == [(-1,) * 4]


def test_what_is_copied_joins_the_tree(runner: MedusaRunner) -> None:
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5))
    copied = Copied((10, 20, 60), log(0.9))  # the first two are what the heads say, too
    found = runner.propose(
        7, [HeadTask(0, 1, OTHER, 3, copied=copied), HeadTask(0, 1, OTHER, 2, copied=copied)]
    )
    assert (found.drafts, found.parents) == ([(10, 20, 60), (10, 20)], [(-1, 0, 1), (-1, 0)])
    other = runner.propose(7, [HeadTask(0, 1, OTHER, 8, copied=Copied((3, 4), log(0.5)))])
    assert (other.drafts, other.parents) == ([(10, 20, 3, 4)], [(-1, 0, -1, 2)])
    unlikely = HeadTask(0, 1, OTHER, 8, copied=Copied((3, 4), log(0.1)))
    assert runner.propose(7, [unlikely]).drafts == [(10, 20, 3)]


def test_logits_of_many_rows_are_made_in_parts(runner: MedusaRunner) -> None:
    sizes: list[int] = []
    heads = runner._heads

    def counted(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[0])
        return heads.model.vocabulary(x)

    runner = MedusaRunner(with_vocabulary(heads, counted))
    piece = SequenceSlice(token_ids=(5,), start=0, block_table=(0,), sample=SAMPLE)
    runner.keep(StepPlan(number=7, slices=(piece,) * 600), 8 * torch.eye(SIZE).repeat(75, 1))
    proposals = runner.propose(7, [HeadTask(index, 0, OTHER, 2, True) for index in range(600)])
    assert proposals.drafts == [(10 * (i % SIZE), 10 * ((i + 1) % SIZE)) for i in range(600)]
    assert sizes == [512, 88] * 2


@pytest.mark.parametrize("task", [HeadTask(3, 0, OTHER, 1), HeadTask(2, 1, OTHER, 1)])
def test_rows_that_are_not_there_give_no_guesses(runner: MedusaRunner, task: HeadTask) -> None:
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5))
    assert runner.propose(7, [HeadTask(0, 0, OTHER, 1), task]).drafts == [(), ()]


def test_without_the_states_of_the_last_step_there_are_no_guesses(runner: MedusaRunner) -> None:
    assert runner.propose(7, [HeadTask(0, 0, OTHER, 1)]).drafts == [()]
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5))
    assert runner.propose(6, [HeadTask(0, 0, OTHER, 1)]).drafts == [()]
    runner.keep(PLAN, None)
    assert runner.propose(7, [HeadTask(0, 0, OTHER, 1)]).drafts == [()]


def test_values_that_are_not_finite_give_no_guesses(runner: MedusaRunner) -> None:
    runner.keep(PLAN, torch.full((6, SIZE), torch.nan))
    proposals = runner.propose(7, [HeadTask(0, 0, OTHER, 2), HeadTask(0, 1, OTHER, 2, True)])
    assert proposals.drafts == [(), ()] and proposals.is_broken


def test_a_fault_of_the_device_ends_the_group_and_another_does_not(runner: MedusaRunner) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise fault

    runner = MedusaRunner(with_vocabulary(runner._heads, broken))
    runner.keep(PLAN, rows(0, 1, 2, 3, 4, 5))
    fault: Exception = torch.AcceleratorError("an illegal memory access")
    with pytest.raises(GroupFailed, match="rank 0 fails in guessing by heads: an illegal memory access"):
        runner.propose(7, [HeadTask(0, 0, OTHER, 2)])
    fault = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        runner.propose(7, [HeadTask(0, 0, OTHER, 2)])
