"""An engine's answers to requests, each when it is finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.engine.engine import Engine
from workers.training.prompts import TextError
from workers.types import FinishReason, GenerateRequest, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    request_id: RequestId
    token_ids: tuple[int, ...]  # with the end id
    is_ended: bool  # by an end id


def answers_to(engine: Engine, requests: Iterable[GenerateRequest]) -> Iterator[Answer]:
    """Adds all of them, then steps until none is left. Raises TextError where one ends in an error, and what
    `Engine.add` raises."""
    found: dict[RequestId, list[int]] = {}
    for request in requests:
        found[request.request_id] = []
        engine.add(request)
    while engine.has_work():
        for chunk in engine.step():
            if chunk.finish_reason is FinishReason.ERROR:
                raise TextError(f"{chunk.request_id}: {chunk.error or 'ended in an error'}")
            found[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not None:
                yield Answer(
                    request_id=chunk.request_id,
                    token_ids=tuple(found.pop(chunk.request_id)),
                    is_ended=chunk.finish_reason is FinishReason.STOP,
                )
