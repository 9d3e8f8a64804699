"""The load generator against the real stack: what it counts is what the engine did."""

from __future__ import annotations

from cluster.bench.load import Server, of_trace, run_load
from cluster.figures.traces import TraceRequest
from tests.cases.serving import Serving
from tests.unit.router.client import server

VOCAB_SIZE = 259


def request(number: int, arrival_s: float, prompt: int, output: int, *ids: int) -> TraceRequest:
    return TraceRequest(
        number=number,
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_ids=ids,
        tokens_per_id=32,
    )


def test_a_replay_shares_prefixes_and_gets_every_token(tiny_server: Serving) -> None:
    trace = [request(0, 0.0, 60, 5, 100, 101), request(1, 1.5, 50, 1, 100, 102), request(2, 1.5, 20, 9, 103)]
    with server(tiny_server.stack) as url:
        outcomes = run_load(
            Server(url=url, headers={}, timeout_s=60.0),
            lambda model: of_trace(trace, vocab_size=VOCAB_SIZE, longest=model.max_model_len),
            lambda text: None,
        ).outcomes
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    assert [outcome.prompt_tokens for outcome in outcomes] == [60, 50, 20]
    assert [outcome.output_tokens for outcome in outcomes] == [5, 1, 9]
    # The second came after the first and has its first 32 tokens, two whole blocks.
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 32, 0]
    assert all(outcome.due_s <= outcome.sent_s <= outcome.token_s[0] for outcome in outcomes)
    assert len(outcomes[1].token_s) == 1
