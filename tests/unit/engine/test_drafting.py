"""Guessed tokens in the engine: the same answers in fewer steps, and no block kept for a wrong guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.engine.toy import (
    LIMITS,
    VOCAB,
    ToyExecutor,
    make_engine,
    make_request,
    numbers,
    reference,
    run,
)
from tests.unit.engine.toy_model import ToyHeads
from workers.config import ScheduleConfig, SpeculativeConfig
from workers.decoding.drafter import METHODS, MODEL_METHODS
from workers.decoding.prompt_lookup import PromptLookup
from workers.engine import text_guesses
from workers.engine.block_pool import BlockPool
from workers.engine.drafting import drafting_of
from workers.engine.proposals import HeadTask, Proposals
from workers.engine.step import StepPlan
from workers.types import FinishReason, GenerateRequest, RequestId

ALL = (*METHODS, *MODEL_METHODS)
CONFIGS = [SpeculativeConfig(method=method, max_draft_tokens=4) for method in ALL]
LOOKUP = SpeculativeConfig(method="prompt_lookup", max_draft_tokens=4)


def _num_drafts(executor: ToyExecutor) -> int:
    return sum(piece.num_drafts for plan in executor.plans for piece in plan.slices)


@pytest.mark.parametrize("speculative", CONFIGS, ids=ALL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_requests", [1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_answer_is_the_one_without_guesses(
    speculative: SpeculativeConfig, temperature: float, num_requests: int, block_size: int
) -> None:
    requests = [
        make_request(
            f"r{i}", numbers(9, i), 60, temperature=temperature, top_k=2, num_logprobs=0, num_choices=2
        )
        for i in range(num_requests)
    ]
    engine, executor = make_engine(block_size=block_size, num_blocks=2048, speculative=speculative)
    plain, _ = make_engine(block_size=block_size, num_blocks=2048)
    for request in requests:
        engine.add(request)
        plain.add(request)
    guessed, expected = run(engine), run(plain)
    for request in requests:
        for choice in range(2):
            assert guessed.tokens[request.request_id, choice] == reference(request, choice)
    assert guessed.logprobs == expected.logprobs
    stats = engine.stats()
    assert stats.drafted_tokens_total == _num_drafts(executor) > 0
    assert 0 < stats.accepted_tokens_total < stats.drafted_tokens_total
    assert engine.stats().num_steps < plain.stats().num_steps


def test_guesses_never_go_past_the_last_token() -> None:
    for max_tokens in range(1, 12):
        request = make_request(
            "a", (1, 1, 1, 1, 1), max_tokens, top_k=1
        )  # always the same: all guesses right
        engine, executor = make_engine(speculative=LOOKUP)
        engine.add(request)
        transcript = run(engine)
        assert transcript.tokens["a", 0] == reference(request)
        assert transcript.reason("a") is FinishReason.LENGTH
        ends = [piece.start + len(piece.token_ids) for plan in executor.plans for piece in plan.slices]
        assert max(ends) <= 5 + max_tokens - 1


def test_an_end_id_inside_the_guesses_ends_the_answer_there() -> None:
    request = make_request("a", (0, 0, 0, 0, 0), 40, top_k=1, min_tokens=7)
    engine, _ = make_engine(eos=(0,), speculative=LOOKUP)
    engine.add(request)
    transcript = run(engine)
    assert transcript.tokens["a", 0] == reference(request, eos=(0,))
    assert transcript.last["a", 0].stop_token_id == 0


def one_that_ends() -> tuple[GenerateRequest, tuple[int, ...], list[int]]:
    """A request, the end id at which its answer ends, and the answer."""
    request = make_request("a", numbers(9), 40, temperature=1.0)
    tokens = reference(request)
    eos = (next(token for place, token in enumerate(tokens) if place > 6 and tokens.index(token) == place),)
    return request, eos, reference(request, eos=eos)


def check_that_all_were_right(
    request: GenerateRequest, eos: tuple[int, ...], speculative: SpeculativeConfig
) -> None:
    """Asked for again and again, where rows cost nothing."""
    engine, _ = make_engine(eos=eos, speculative=speculative, clock=lambda: 0.0)
    for number in range(20):
        engine.add(replace(request, request_id=RequestId(f"r{number}")))
        assert run(engine).last[f"r{number}", 0].stop_token_id == eos[0]
    assert engine.stats().accepted_tokens_total > 40
    assert engine._drafting is not None
    assert engine._drafting._governor.chance.value > 0.95


def test_a_right_guess_that_ends_its_answer_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is thought of guesses does not fall with the end of every answer."""
    request, eos, answer = one_that_ends()

    class Prophet(PromptLookup):
        def propose(self, max_tokens: int) -> tuple[int, ...]:
            return tuple(answer[self.num_tokens - 9 :][:max_tokens])

    monkeypatch.setattr(text_guesses, "drafter_of", lambda method: Prophet())
    check_that_all_were_right(request, eos, LOOKUP)


def test_a_right_guess_of_a_tree_that_ends_its_answer_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    request, eos, answer = one_that_ends()
    wrong = next(token for token in range(VOCAB) if token not in answer)

    def guess(heads: ToyHeads, task: HeadTask) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The answer, and behind its end wrong ones for the next place."""
        told = answer[len(heads.seen[task.slice][task.row]) - 9 :][: task.num_drafts]
        num_wrong = task.num_drafts - len(told)
        return (*told, *[wrong] * num_wrong), (*range(-1, len(told) - 1), *[-1] * num_wrong)

    monkeypatch.setattr(ToyHeads, "_guess", guess)
    medusa = SpeculativeConfig(method="medusa", max_draft_tokens=4)
    check_that_all_were_right(request, eos, medusa)


def test_what_becomes_of_chains_of_heads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of all guesses where answers have grammars."""

    def propose(_: ToyHeads, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        return Proposals([(VOCAB - 1,) * task.num_drafts for task in tasks])  # wrong ones

    monkeypatch.setattr(ToyHeads, "propose", propose)
    medusa = SpeculativeConfig(method="medusa", max_draft_tokens=4)
    engine, _ = make_engine(speculative=medusa, clock=lambda: 0.0)
    engine.add(make_request("a", numbers(9), 40, top_k=2))
    run(engine)
    assert engine.stats().accepted_tokens_total == 0 < engine.stats().drafted_tokens_total
    assert engine._drafting is not None and engine._drafting._governor._tree is not None
    assert engine._drafting._governor._tree.values(1)[0] < 0.1


def test_blocks_of_wrong_guesses_are_given_back_at_once() -> None:
    engine, executor = make_engine(block_size=1, speculative=LOOKUP)
    engine.add(make_request("a", numbers(9), 40, top_k=2))
    while engine.has_work():
        engine.step()
        engine.check_integrity()  # asserts that a table covers the computed tokens and no more
    assert _num_drafts(executor) > engine.stats().accepted_tokens_total


def test_in_a_full_batch_nobody_looks_for_guesses_that_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row takes its time, and what is guessed is wrong: but for trials, guessing costs nothing."""
    looked = [0]

    class Wrong(PromptLookup):
        def propose(self, max_tokens: int) -> tuple[int, ...]:
            looked[0] += 1
            return (VOCAB - 1,) * max_tokens

    monkeypatch.setattr(text_guesses, "drafter_of", lambda method: Wrong())
    now = [0.0]
    engine, executor = make_engine(num_blocks=2048, speculative=LOOKUP, clock=lambda: now[0])

    def pass_time(plan: StepPlan) -> None:
        now[0] += sum(len(piece.token_ids) for piece in plan.slices) / 1000

    executor.before_step = pass_time
    for i in range(32):
        engine.add(make_request(f"r{i}", numbers(9, i), 120, top_k=2))
    run(engine)
    num_steps = engine.stats().num_steps
    assert num_steps > 110
    assert looked[0] < 32 * 4 + num_steps // 8
    assert engine.stats().drafted_tokens_total < 32 * num_steps // 20


def test_guesses_take_no_blocks_from_anybody() -> None:
    requests = [make_request(f"r{i}", numbers(8, i), 24, top_k=2) for i in range(3)]
    engine, _ = make_engine(block_size=4, num_blocks=24, expected_output_tokens=24, speculative=LOOKUP)
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    assert engine.stats().preemptions_total == 0  # 3 x 8 blocks are all that they need
    assert all(transcript.tokens[request.request_id, 0] == reference(request) for request in requests)


def test_steps_stay_within_their_budget() -> None:
    engine, executor = make_engine(max_step_tokens=5, max_running=4, speculative=LOOKUP)
    for i in range(4):
        engine.add(make_request(f"r{i}", numbers(9, i), 30, top_k=1))
    run(engine)
    assert max(sum(len(piece.token_ids) for piece in plan.slices) for plan in executor.plans) == 5


@pytest.mark.parametrize(
    "config",
    [SpeculativeConfig(method="guess"), SpeculativeConfig(method="prompt_lookup", max_draft_tokens=0)],
)
def test_an_unknown_method_and_no_guesses_are_refused(config: SpeculativeConfig) -> None:
    with pytest.raises(ValueError, match="speculative"):
        drafting_of(config, BlockPool(4), 16, ToyExecutor(4, 16), LIMITS, ScheduleConfig())
