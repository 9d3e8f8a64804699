"""Shapes of planned steps."""

from cluster.figures.step_cost import StepShape
from cluster.figures.step_shape import shape_of
from workers.engine.step import SampleTask, SequenceSlice, StepPlan
from workers.types import SamplingParams


def test_the_shape_of_a_plan() -> None:
    def piece(start: int, count: int, prompt: int, *, is_last: bool = True) -> SequenceSlice:
        task = SampleTask(
            params=SamplingParams(max_tokens=1),
            choice=0,
            prompt_token_ids=range(prompt),
            output_token_ids=(),
        )
        ids = list(range(count))
        return SequenceSlice(token_ids=ids, start=start, block_table=[0], sample=task if is_last else None)

    plan = StepPlan(
        number=1,
        slices=[
            piece(20, 1, 20),  # a decode row: attends to 21
            piece(7, 1, 5),  # another: 8
            piece(9, 1, 10),  # the last token of a prompt, which costs the same: 10
            piece(3, 1, 10, is_last=False),  # a token in the middle of one: 4 pairs
            piece(4, 3, 50, is_last=False),  # 5 + 6 + 7 pairs
        ],
    )
    assert shape_of(plan) == StepShape(prefill_tokens=4, prefill_pairs=22, decode_rows=3, context_tokens=39)
