"""From a plan to arrays, over the wire, to the tensors of a batch."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from tests.unit.runtime.factories import piece, task
from workers.engine.step import StepPlan
from workers.kernels import StepMessage, build_batch, header_of, passes, unpack
from workers.runtime.step_codec import encode

CPU = torch.device("cpu")

PLAN = StepPlan(
    number=1,
    slices=[
        piece([50], start=6, blocks=[3, 9], sample=task()),
        piece([11, 12, 13, 14, 15], start=0, blocks=[7, 2], targets=[12, 13, 14, 15]),
        piece([21, 22, 23], start=4, blocks=[5, 1, 8], sample=task(), targets=[22, 23]),
    ],
    zero_blocks=[4, 6],
    copy_blocks=[(3, 0), (3, 2)],
)


def batch_of(message: StepMessage, num_blocks: int = 10, block_size: int = 4):
    return build_batch(
        unpack(message), block_size=block_size, num_blocks=num_blocks, vocab_size=100, device=CPU
    )


def test_message_of_a_plan():
    message = encode(PLAN, block_size=4)
    assert header_of(message) == (3, 9, 6, 8, 2, 2, 7, 0, 0)
    arrays = unpack(message)
    assert arrays.lens.tolist() == [1, 5, 3]
    assert arrays.starts.tolist() == [6, 0, 4]
    assert arrays.block_counts.tolist() == [2, 2, 2]  # the third table has a block more than is needed
    assert arrays.token_ids.tolist() == [50, 11, 12, 13, 14, 15, 21, 22, 23]
    assert arrays.blocks.tolist() == [3, 9, 7, 2, 5, 1]
    assert arrays.logit_rows.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert arrays.zero_blocks.tolist() == [4, 6]
    assert (arrays.copy_sources.tolist(), arrays.copy_targets.tolist()) == ([3, 3], [0, 2])


def test_batch_of_a_plan():
    batch = batch_of(encode(PLAN, block_size=4))
    assert batch.token_ids.tolist() == [50, 11, 12, 13, 14, 15, 21, 22, 23]
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 4, 4, 5, 6]
    assert batch.slots.tolist() == [9 * 4 + 2, 28, 29, 30, 31, 8, 4, 5, 6]
    assert batch.query_starts.tolist() == [0, 1, 6, 9]
    assert batch.context_lens.tolist() == [7, 5, 7]
    assert batch.block_tables.tolist() == [[3, 9], [7, 2], [5, 1]]
    assert batch.max_context_len == 7
    wide = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
    assert {values.dtype for values in wide} == {torch.int64}
    narrow = (batch.query_starts, batch.context_lens, batch.block_tables)
    assert {values.dtype for values in narrow} == {torch.int32}


def test_random_plans_have_their_slots():
    source = random.Random(5)
    for _ in range(50):
        slices = []
        for _ in range(source.randrange(1, 12)):
            length, start = source.randrange(1, 9), source.randrange(0, 30)
            blocks = [source.randrange(64) for _ in range(-(-(start + length) // 4) + source.randrange(2))]
            tokens = [source.randrange(100) for _ in range(length)]
            slices.append(piece(tokens, start=start, blocks=blocks, sample=task()))
        batch = batch_of(encode(StepPlan(number=1, slices=slices), block_size=4), num_blocks=64)
        for row in range(len(batch.slots)):
            owner = int((batch.query_starts[1:] <= row).sum())
            position = int(batch.positions[row])
            block = slices[owner].block_table[position // 4]
            assert int(batch.slots[row]) == block * 4 + position % 4


def test_damaged_messages_are_refused():
    message = encode(PLAN, block_size=4)
    for damaged in (b"", message[:-1], message[:-4], message + b"\0\0\0\0", message[4:]):
        with pytest.raises(ValueError, match="a step of"):
            unpack(StepMessage(damaged))
    values = np.frombuffer(message, dtype=np.int32).copy()
    values[9] += 1  # a length that does not add up
    with pytest.raises(ValueError, match="add up"):
        unpack(StepMessage(values.tobytes()))
    values = np.frombuffer(message, dtype=np.int32).copy()
    values[1], values[2] = -1, values[2] + values[1] + 1
    with pytest.raises(ValueError, match="integers"):
        unpack(StepMessage(values.tobytes()))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (piece([50], start=0, blocks=[10]), "block outside 0 .. 9: 10"),
        (piece([50], start=0, blocks=[-1]), "block outside"),
        (piece([100], start=0, blocks=[1]), "token id outside 0 .. 99"),
        (piece([-1], start=0, blocks=[1]), "token id outside"),
    ],
)
def test_indices_outside_are_refused_before_a_kernel_sees_them(bad, says):
    with pytest.raises(ValueError, match=says):
        batch_of(encode(StepPlan(number=1, slices=[bad]), block_size=4))


def test_too_few_blocks_is_our_bug():
    with pytest.raises(AssertionError, match="1 blocks for 3 \\+ 2 tokens"):
        encode(StepPlan(number=1, slices=[piece([1, 2], start=3, blocks=[0])]), block_size=4)


def test_many_logit_rows_are_made_in_passes():
    message = encode(PLAN, block_size=4)
    assert passes(message) == [message]
    parts = [unpack(part) for part in passes(message, max_rows=3)]
    assert [part.logit_rows.tolist() for part in parts] == [[0, 1, 2], [3, 4, 6], [7, 8]]
    assert [part.zero_blocks.tolist() for part in parts] == [[4, 6], [], []]
    assert [part.copy_targets.tolist() for part in parts] == [[0, 2], [], []]
    assert all(part.token_ids.tolist() == unpack(message).token_ids.tolist() for part in parts)


def test_a_step_of_32_rows_is_cheap():
    plan = StepPlan(
        number=1,
        slices=[piece([i], start=500, blocks=list(range(i, i + 32)), sample=task()) for i in range(32)],
    )
    best = min(_seconds(plan) for _ in range(30))
    assert best < 300e-6  # about 60 us on an idle core


def _seconds(plan: StepPlan) -> float:
    start = time.perf_counter()
    encode(plan, block_size=16)
    return time.perf_counter() - start
