"""The draft model on rank 0: a decoder of its own over a pool of its own, whatever the number of ranks.

It has all heads and the whole vocabulary on that rank: a pass of a small model takes less time than the sums
over ranks in it would, and the other ranks need not know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from workers.engine.proposals import DraftTask, Pass, Proposals
from workers.kernels import NOT_FINITE, PagedCache, StepMessage, pack_step
from workers.model.decoder import Decoder
from workers.runtime.device import ends_the_group
from workers.runtime.sampler import BEST


class DraftRunner:
    """Implements `workers.engine.proposals.DraftModel`."""

    def __init__(self, decoder: Decoder, pool: PagedCache) -> None:
        """pool: block by block beside the served model's."""
        self._decoder = decoder
        self._pool = pool
        self._ids = decoder.head_ids

    @property
    def max_tokens(self) -> int:
        return self._decoder.spec.max_model_len

    def propose(self, tasks: Sequence[DraftTask]) -> Proposals:
        """A task whose values are not finite gets no more guesses. Raises GroupFailed when the device
        cannot compute any more."""
        with ends_the_group("guessing by a draft model"):
            return self._propose(tasks)

    def _propose(self, tasks: Sequence[DraftTask]) -> Proposals:
        drafts: list[list[int]] = [[] for _ in tasks]
        is_broken = False
        passes: list[Pass] = []
        rows = [(task.start, task.token_ids) for task in tasks]
        going_on = list(range(len(tasks)))
        number = 0
        while going_on:
            began = perf_counter()
            asked = [index for index in going_on if tasks[index].num_drafts > number]
            drawn = self._decoder.forward(
                self._message(tasks, going_on, rows, set(asked)), self._pool, [BEST] * len(asked)
            )
            assert drawn is not None, "a group of one rank gets its logits"
            passes.append(Pass(sum(len(rows[index][1]) for index in going_on), perf_counter() - began))
            number += 1
            going_on = []
            for index, drawn_id in zip(asked, drawn.ids, strict=True):
                if drawn_id == NOT_FINITE:
                    is_broken = True
                    continue
                token_id = drawn_id if self._ids is None else self._ids[drawn_id]
                drafts[index].append(token_id)
                rows[index] = (rows[index][0] + len(rows[index][1]), (token_id,))
                if tasks[index].num_drafts > number:
                    going_on.append(index)
        return Proposals([tuple(found) for found in drafts], passes, is_broken=is_broken)

    def _message(
        self,
        tasks: Sequence[DraftTask],
        chosen: Sequence[int],
        rows: Sequence[tuple[int, Sequence[int]]],
        asked: set[int],
    ) -> StepMessage:
        """One pass. rows: of each task, where its tokens begin, and the tokens; asked: the tasks that have a
        token guessed after their last one."""
        block_size = self._pool.block_size
        counts: list[int] = []
        token_ids: list[int] = []
        blocks: list[int] = []
        logit_rows: list[int] = []
        for index in chosen:
            start, tokens = rows[index]
            count = -(-(start + len(tokens)) // block_size)
            counts.append(count)
            token_ids += tokens
            blocks += tasks[index].block_table[:count]
            if index in asked:
                logit_rows.append(len(token_ids) - 1)
        return pack_step(
            lens=[len(rows[index][1]) for index in chosen],
            starts=[rows[index][0] for index in chosen],
            block_counts=counts,
            token_ids=token_ids,
            blocks=blocks,
            logit_rows=logit_rows,
        )
