"""The first step of a group."""

from __future__ import annotations

from workers.engine.proposals import DraftTask, HeadTask
from workers.engine.step import Executor, GroupFailed, SampleTask, SequenceSlice, StepPlan
from workers.types import SamplingParams


def compute_first_step(executor: Executor) -> None:
    """One token through all ranks: a broken kernel or a deaf rank shows before the first request.

    It writes to block 0, which no request holds yet. Raises GroupFailed.
    """
    task = SampleTask(
        params=SamplingParams(max_tokens=1, temperature=0.0),
        choice=0,
        prompt_token_ids=(0,),
        output_token_ids=(),
    )
    piece = SequenceSlice(token_ids=(0,), start=0, block_table=(0,), sample=task)
    (result,) = executor.execute(StepPlan(number=0, slices=(piece,))).slices
    if result.error is not None:
        raise GroupFailed(f"the first step failed: {result.error}")
    if executor.draft_model is not None:
        guess = DraftTask(token_ids=(0,), start=0, block_table=(0,), num_drafts=1)
        if not executor.draft_model.propose((guess,)).drafts[0]:
            raise GroupFailed("the draft model's first guess failed: its values are not finite numbers")
    if (
        executor.draft_heads is not None
        and not executor.draft_heads.propose(0, (HeadTask(0, 0, 0, 1),)).drafts[0]
    ):
        raise GroupFailed("the heads' first guess failed: their values are not finite numbers")
