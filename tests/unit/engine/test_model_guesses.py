"""What a draft model is asked to read and to guess. The toy's asserts that what it is said to know is so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.engine.toy import LIMITS, ToyExecutor, make_engine, make_request, numbers, reference, run
from tests.unit.engine.toy_model import ToyDraft
from workers.config import ScheduleConfig, SpeculativeConfig
from workers.decoding.drafter import DRAFT_MODEL
from workers.engine.block_pool import BlockPool
from workers.engine.drafting import drafting_of
from workers.engine.engine import Engine
from workers.engine.proposals import DraftTask, Pass, Proposals
from workers.engine.step import StepPlan

GUESSING = SpeculativeConfig(method=DRAFT_MODEL, max_draft_tokens=4)


def _num_read(executor: ToyExecutor) -> int:
    assert executor.draft_model is not None
    return sum(len(task.token_ids) for task in executor.draft_model.tasks)


def _engine(**options: int | bool) -> tuple[Engine, ToyExecutor, ToyDraft]:
    engine, executor = make_engine(speculative=GUESSING, **options)
    assert executor.draft_model is not None
    return engine, executor, executor.draft_model


def test_a_token_is_read_once() -> None:
    engine, _, draft = _engine(block_size=4)
    engine.add(make_request("a", numbers(30), 40, top_k=2))
    run(engine)
    first, *others = draft.tasks
    assert (first.start, len(first.token_ids)) == (0, 31 + 1)
    for task in others:
        # The newest token, and the last guess when it was right: of that one it has nothing.
        assert len(task.token_ids) <= 2
    assert {len(task.token_ids) for task in others} == {1, 2}


def test_a_prompt_in_the_prefix_cache_is_not_read_again() -> None:
    engine, _, draft = _engine(block_size=4)
    for name in "ab":
        engine.add(make_request(name, numbers(30), 12, top_k=2))
        run(engine)
    starts = [task.start for task in draft.tasks if len(task.token_ids) > 2]
    assert starts == [0, 28]  # of b: what lies behind the seven full blocks


def test_blocks_that_were_computed_without_guesses_are_read_when_there_are_some() -> None:
    """Of one token there is nothing to guess, so that nothing is read either."""
    engine, executor, draft = _engine(block_size=4)
    engine.add(make_request("a", numbers(30), 1))
    run(engine)
    assert _num_read(executor) == 0
    engine.add(make_request("b", numbers(30), 12, top_k=2))
    transcript = run(engine)
    assert transcript.cached("b") == 28
    assert (draft.tasks[0].start, len(draft.tasks[0].token_ids)) == (0, 32)


def test_what_is_long_is_read_in_parts_and_guessed_from_at_the_end() -> None:
    engine, _, draft = _engine(num_blocks=256)
    request = make_request("a", numbers(1300), 12, top_k=2)
    engine.add(request)
    assert run(engine).tokens["a", 0] == reference(request)
    read = [(task.start, len(task.token_ids), task.num_drafts > 0) for task in draft.tasks[:3]]
    assert read == [(0, 512, False), (512, 512, False), (1024, 1300 + 4 - 1024, True)]


@pytest.mark.parametrize(("max_tokens", "starts"), [(400, [0, 512, 1024]), (40, [0])])
def test_a_long_prompt_is_read_to_its_end_for_a_long_answer(
    max_tokens: int, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row takes a millisecond, a step 20. What the first part took is not what a guess takes, but the rest
    takes as long, which guesses have to bring in."""
    now = [0.0]
    engine, executor = make_engine(num_blocks=256, speculative=GUESSING, clock=lambda: now[0])
    draft = executor.draft_model
    assert draft is not None
    propose = draft.propose

    def pass_time(_: StepPlan) -> None:
        now[0] += 0.02

    def timed(tasks: Sequence[DraftTask]) -> Proposals:
        (task,) = tasks
        passes = [Pass(rows, rows / 1000) for rows in (len(task.token_ids), *[1] * (task.num_drafts - 1))]
        now[0] += sum(each.seconds for each in passes)
        return propose(tasks)._replace(passes=passes)

    executor.before_step = pass_time
    monkeypatch.setattr(draft, "propose", timed)
    request = make_request("a", numbers(1300), max_tokens, top_k=2, ignore_eos=True)
    engine.add(request)
    assert run(engine).tokens["a", 0] == reference(request)
    assert [task.start for task in draft.tasks if len(task.token_ids) > 2] == starts
    assert (engine.stats().accepted_tokens_total > 0) is (len(starts) > 1)


def test_nothing_is_guessed_beyond_what_the_draft_model_can_read() -> None:
    engine, _, draft = _engine(block_size=4)
    draft.max_tokens = 24
    request = make_request("a", numbers(12), 40, top_k=2)
    engine.add(request)
    assert run(engine).tokens["a", 0] == reference(request)
    ends = [task.start + len(task.token_ids) + task.num_drafts for task in draft.tasks]
    assert 20 < max(ends) <= 24


def test_preemption_and_little_memory() -> None:
    requests = [make_request(f"r{i}", numbers(9, i), 30, top_k=2) for i in range(5)]
    engine, _, _ = _engine(block_size=2, num_blocks=40, expected_output_tokens=1)
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    assert engine.stats().preemptions_total > 0
    assert 0 < engine.stats().accepted_tokens_total < engine.stats().drafted_tokens_total
    assert all(transcript.tokens[request.request_id, 0] == reference(request) for request in requests)


def test_without_a_draft_model_the_method_is_refused() -> None:
    executor = ToyExecutor(4, 16)
    executor.draft_model = None
    with pytest.raises(ValueError, match="has loaded no draft model"):
        drafting_of(GUESSING, BlockPool(4), 16, executor, LIMITS, ScheduleConfig())
