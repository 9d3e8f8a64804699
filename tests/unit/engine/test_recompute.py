"""Models that turn keys by the length of their sequence: what steps are told, and what is computed again."""

from __future__ import annotations

import pytest

from tests.unit.engine.toy import LIMITS, ToyExecutor, make_engine, make_request, numbers, reference, run
from tests.unit.engine.toy_reference import reference_search
from workers.config import SpeculativeConfig
from workers.types import BeamParams

PAST = 20


def slices(executor: ToyExecutor) -> list[tuple[int, int, int]]:
    """(start, end, tokens that the sequence has) of all slices, the last 0 where all of them are computed."""
    return [
        (piece.start, piece.start + len(piece.token_ids), piece.num_known)
        for plan in executor.plans
        for piece in plan.slices
    ]


def test_all_of_it_is_computed_again_once_before_it_grows_past_the_limit() -> None:
    engine, executor = make_engine(recompute_past=PAST, max_prefill_chunk=9)
    request = make_request("a", numbers(17), 6)
    engine.add(request)
    assert run(engine).tokens["a", 0] == reference(request)
    assert slices(executor) == [
        *((0, 9, 17), (9, 17, 0), (17, 18, 0), (18, 19, 0), (19, 20, 0)),
        *((0, 9, 21), (9, 18, 21), (18, 21, 0), (21, 22, 0)),
    ]
    assert engine.stats().preemptions_total == 0


def test_a_prompt_beyond_the_limit_is_told_so_and_computed_once() -> None:
    engine, executor = make_engine(recompute_past=PAST, max_prefill_chunk=16)
    engine.add(make_request("a", numbers(21), 3))
    run(engine)
    assert slices(executor) == [(0, 16, 21), (16, 21, 0), (21, 22, 0), (22, 23, 0)]


def test_other_models_are_told_nothing() -> None:
    engine, executor = make_engine(max_prefill_chunk=16)
    engine.add(make_request("a", numbers(21), 3))
    run(engine)
    assert not LIMITS.turns_by_length and all(known == 0 for _, _, known in slices(executor))


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model", "medusa"])
def test_no_step_with_guesses_goes_past_the_limit(method: str) -> None:
    speculative = SpeculativeConfig(method=method, max_draft_tokens=4, model="toy")
    engine, executor = make_engine(recompute_past=PAST, speculative=speculative)
    requests = [make_request(f"r{seed}", numbers(8 + seed, seed), 30, top_k=3) for seed in range(6)]
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    for request in requests:
        assert transcript.tokens[request.request_id, 0] == reference(request)
    assert not [piece for piece in slices(executor) if 0 < piece[0] < PAST < piece[1]]


def test_hypotheses_of_a_search_are_computed_again_together() -> None:
    engine, executor = make_engine(recompute_past=PAST)
    request = make_request("a", numbers(14), 12, beam=BeamParams(width=3))
    engine.add(request)
    found = run(engine).tokens["a", 0]
    assert found == list(reference_search(request)[0].token_ids)
    again = [piece for plan in executor.plans[7:8] for piece in plan.slices]
    assert [(piece.start, piece.num_known) for piece in again] == [(0, 21)]
