"""A fixed prompt that a group is asked now and then: the answer has to be the one of the start.

A device that computes wrongly, or weights that something has written over, give finite numbers that mean
nothing, and no request can tell. So the log-probabilities of a fixed text are computed before the first
request and once a minute from then on, as a request among the others; when they differ from the first ones by
more than rounding can explain, and do so again when asked at once, the group cannot be trusted any more, and
ends.

Not covered: what goes wrong in the path of decoding alone, and in requests of another shape; and finite
numbers that are wrong from the start: a group that is built anew on a damaged device takes that device's
answer for the right one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from workers.engine.engine import Engine
from workers.engine.request import EngineLimits
from workers.engine.step import GroupDistrusted, GroupFailed
from workers.types import FinishReason, GenerateRequest, RequestId, RequestRefused, SamplingParams, TokenChunk

INTERVAL_S = 60.0
_NUM_TOKENS = 12  # less than a block of the default size: the prefix cache gets nothing of it
_STRIDE = 7919  # between the ids of the text; a prime
# In the mean over the text. Exactly 0 where sums are made in one order, as on one GPU (`kernels.gpu.linear`);
# across GPUs NCCL's order may depend on the size of a message, and where that leads a token to another expert
# it may come to more than this: hence the second question.
_MOST_NATS = 0.1
_FIRST = -1_000_000  # priority, before all requests of clients

_log = logging.getLogger(__name__)


class Canary:
    """The prompt, what it gave first, and when it is due again. Used by the engine's thread."""

    def __init__(self, limits: EngineLimits, clock: Callable[[], float]) -> None:
        self._prompt = tuple(
            (1 + number * _STRIDE) % limits.vocab_size
            for number in range(max(1, min(_NUM_TOKENS, limits.max_model_len - 1)))
        )
        self._clock = clock
        self._wanted: list[float] | None = None
        self._running: RequestId | None = None
        self._answer: TokenChunk | None = None  # not judged yet
        self._is_in_doubt = False  # the last answer was not the first one
        self._number = 0
        self._due_s = 0.0

    @property
    def is_due(self) -> bool:
        return self._running is None and self._clock() >= self._due_s

    def owns(self, request_id: RequestId) -> bool:
        return request_id == self._running

    def prove(self, engine: Engine) -> None:
        """Asks for the first time, of an engine that has no other requests. Raises GroupFailed."""
        self.ask(engine)
        while self._running is not None:
            if not engine.can_step():
                raise GroupFailed("the canary prompt got no answer")
            self.take(engine.step())
            self.judge()

    def ask(self, engine: Engine) -> None:
        """Adds the request. One that the engine refuses, as its queue is full, is asked in a minute."""
        self._number += 1
        self._due_s = self._clock() + INTERVAL_S
        request_id = RequestId(f"canary of the group {self._number}")
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=self._prompt,
            sampling=SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, num_logprobs=0, num_prompt_logprobs=0
            ),
            priority=_FIRST,
            cache_salt=request_id,
        )
        try:
            engine.add(request, is_counted=False)
        except RequestRefused as refused:
            if self._wanted is None:
                raise GroupFailed(f"the canary prompt was refused: {refused.message}") from refused
            return
        self._running = request_id

    def take(self, chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
        """Those of others; keeps the answer for judge()."""
        others = []
        for chunk in chunks:
            if self.owns(chunk.request_id):
                self._answer, self._running = chunk, None
            else:
                others.append(chunk)
        return others

    def judge(self) -> None:
        """To be called after take(). An answer that is not the first one is asked for again, at once; raises
        GroupDistrusted for the second such in a row, and at the start for one that is no answer."""
        chunk, self._answer = self._answer, None
        if chunk is None:
            return
        problem = self._problem(chunk)
        if problem is not None and (self._is_in_doubt or self._wanted is None):
            raise GroupDistrusted(problem)
        self._is_in_doubt = problem is not None
        if problem is not None:
            _log.warning("%s; it is asked again", problem)
            self._due_s = self._clock()

    def _problem(self, chunk: TokenChunk) -> str | None:
        """What is wrong with an answer; the first good one is what the others have to be."""
        if chunk.finish_reason is FinishReason.ERROR:
            return f"the canary prompt failed: {chunk.error}"
        scores = [*(chunk.prompt_logprobs or ()), *(chunk.logprobs or ())]
        found = [score.logprob for score in scores if score is not None]
        if not found or not all(map(math.isfinite, found)):
            return "the canary prompt gave log-probabilities that are not finite numbers"
        if self._wanted is None:
            self._wanted = found
            return None
        off = sum(abs(one - other) for one, other in zip(found, self._wanted, strict=True)) / len(found)
        if off <= _MOST_NATS:
            return None
        return (
            f"the canary prompt gave other log-probabilities than at the start, by {off:.3g} nats in the "
            "mean: weights or device are damaged"
        )
