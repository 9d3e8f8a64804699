"""Open-loop load: requests are sent when they are due, however many are still unanswered.

A closed loop sends the next request when one is answered, so that a slow server is asked less often and its
slow answers are never waited for by those who would have come meanwhile (coordinated omission). Here arrivals
are drawn, or read from a trace, before the run, and every latency counts from the moment a request was due.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.bench.client import CompletionClient, ServedModel, completion_body, wait_until
from cluster.bench.latency import Outcome
from cluster.figures.traces import FIRST_TOKEN, TraceRequest, prompt_tokens

_HEAD_START_S = 0.2  # between the start of a run and its first arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A request and when it is to be sent, in seconds after the first."""

    number: int
    due_s: float
    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where to send, and how long to wait."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float


def poisson(
    *, rate: float, requests: int, prompt: int, output: int, vocab_size: int, seed: int, shared: int = 0
) -> Iterator[Due]:
    """Arrivals of a Poisson process; random prompts whose first `shared` tokens are all the same."""
    drawn = random.Random(seed)
    ids = range(FIRST_TOKEN, vocab_size)
    beginning = drawn.choices(ids, k=min(shared, prompt))
    due_s = 0.0
    for number in range(requests):
        rest = drawn.choices(ids, k=prompt - len(beginning))
        yield Due(number=number, due_s=due_s, prompt=[*beginning, *rest], max_tokens=output)
        due_s += drawn.expovariate(rate)


def of_trace(requests: Iterable[TraceRequest], *, vocab_size: int, longest: int | None) -> Iterator[Due]:
    """A trace's requests. Those beyond `longest` tokens are cut at the end of their prompt, which leaves the
    beginnings that they share."""
    start = None
    for request in requests:
        start = request.arrival_s if start is None else start
        output = request.output_tokens
        prompt = prompt_tokens(request, vocab_size)
        if longest is not None:
            output = min(output, max(1, longest // 2))
            prompt = prompt[: max(1, longest - output)]
        yield Due(number=request.number, due_s=request.arrival_s - start, prompt=prompt, max_tokens=output)


class LoadRun(NamedTuple):
    """What became of all requests, by number, and the model that they were made for."""

    model: ServedModel
    outcomes: list[Outcome]


MakeLoad = Callable[[ServedModel], Iterable[Due]]


def run_load(server: Server, make: MakeLoad, report: Callable[[str], None]) -> LoadRun:
    """Sends what `make` gives for the server's model, in its order, and waits for all answers.

    Raises ServerUnusable when it cannot even be asked for its model.
    """
    return asyncio.run(_run(server, make, report))


async def _run(server: Server, make: MakeLoad, report: Callable[[str], None]) -> LoadRun:
    clock = time.perf_counter
    outcomes: list[Outcome] = []
    client = CompletionClient(server.url, headers=server.headers, timeout_s=server.timeout_s, clock=clock)
    async with client:
        model = await client.model()
        report(f"{server.url} serves {model.name}")
        start = clock() + _HEAD_START_S
        async with asyncio.TaskGroup() as tasks:
            for due in make(model):
                body = completion_body(model.name, due.prompt, due.max_tokens)  # while nothing is due
                await wait_until(start + due.due_s, clock)
                tasks.create_task(_send(client, due, body, start, clock, outcomes))
    return LoadRun(model, sorted(outcomes, key=lambda outcome: outcome.number))


async def _send(
    client: CompletionClient,
    due: Due,
    body: bytes,
    start: float,
    clock: Callable[[], float],
    outcomes: list[Outcome],
) -> None:
    sent = clock()
    answer = await client.complete(body)
    outcomes.append(
        Outcome(
            number=due.number,
            due_s=due.due_s,
            sent_s=sent - start,
            token_s=tuple(at - start for at in answer.token_s),
            end_s=answer.end_s - start,
            prompt_tokens=answer.prompt_tokens or len(due.prompt),
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            error=answer.error,
        )
    )
