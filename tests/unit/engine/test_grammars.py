"""Requests with grammars in the engine: waiting for the compiler, masks, drafts, ends and failures."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from tests.unit.engine.rising import EOS, Backend, Rising, engine_of, settled, with_grammar
from tests.unit.engine.toy import Transcript, make_request, numbers
from workers.config import SpeculativeConfig
from workers.decoding.drafter import MODEL_METHODS
from workers.engine.grammars import COMPILE_TIMEOUT_S
from workers.engine.loop import EngineLoop, StepOutput
from workers.types import (
    BeamParams,
    BegunChoice,
    FinishReason,
    GenerateRequest,
    Grammar,
    RequestId,
    RequestRefused,
)

GUESSES = SpeculativeConfig(method="prompt_lookup", max_draft_tokens=4)


def test_answers_follow_and_end_with_their_grammar() -> None:
    engine = engine_of(Backend())
    engine.add(with_grammar(make_request("a", numbers(20), 12, num_choices=2, temperature=1.0), "3 6"))
    engine.add(make_request("free", numbers(9, 1), 12))
    found = settled(engine)
    for choice in (0, 1):
        tokens = found.tokens["a", choice]
        if tokens[-1] == EOS:
            tokens = tokens[:-1]
        else:
            assert len(tokens) == 6 and found.last["a", choice].stop_token_id is None
        assert all(token % 3 == 0 for token in tokens)
        assert found.reason("a", choice) is FinishReason.STOP
    assert any(token % 3 for token in found.tokens["free", 0])


@pytest.mark.parametrize("text", ["2 30", "5 17"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_same_with_guesses_chunks_and_little_memory(text: str, block_size: int) -> None:
    def answers(**options: object) -> dict[tuple[str, int], list[int]]:
        engine = engine_of(Backend(), block_size=block_size, **options)
        for name in ("a", "b", "c"):
            request = make_request(name, numbers(25, ord(name)), 24, num_choices=2, temperature=1.0, top_k=20)
            engine.add(with_grammar(request, text))
        return settled(engine).tokens

    plain = answers(num_blocks=2048 // block_size)
    for method in (GUESSES.method, *MODEL_METHODS):
        guessing = replace(GUESSES, method=method)
        assert answers(num_blocks=2048 // block_size, speculative=guessing) == plain
    assert answers(num_blocks=2048 // block_size, max_step_tokens=7, max_prefill_chunk=5) == plain
    assert answers(num_blocks=100 // block_size, expected_output_tokens=1) == plain  # with preemptions


def test_others_run_while_one_waits_for_the_compiler() -> None:
    backend = Backend()
    backend.gate.clear()
    engine = engine_of(backend)
    engine.add(with_grammar(make_request("slow", numbers(20), 4), "2 4"))
    assert engine.step() == [] and not engine.can_step() and engine.has_timers()
    engine.add(make_request("free", numbers(9, 1), 4))
    found = Transcript()
    while ("free", 0) not in found.last:
        found.take(engine.step())
    assert engine.stats().num_waiting == 1 and engine.step() == []
    backend.gate.set()
    settled(engine, found)
    assert len(found.tokens["slow", 0]) == 4


def test_a_compiled_grammar_is_kept() -> None:
    backend = Backend()
    engine = engine_of(backend)
    for name in ("a", "b"):
        engine.add(with_grammar(make_request(name, numbers(5), 3), "2 3"))
        settled(engine)
    assert backend.compiled == ["2 3"]


@pytest.mark.parametrize(("num_bytes", "num_kept"), [(1000, 64), (200 << 20, 3), (800 << 20, 1)])
def test_the_oldest_grammars_are_forgotten_when_they_are_many_or_large(num_bytes: int, num_kept: int) -> None:
    """64 of them, or 768 MiB, but the newest one in any case."""
    backend = Backend()
    backend.num_bytes = num_bytes
    engine = engine_of(backend)
    texts = [f"2 {most}" for most in range(3, 3 + num_kept + 2)]

    def ask(text: str) -> None:
        engine.add(with_grammar(make_request(text, numbers(5), 3), text))
        settled(engine)

    for text in texts:
        ask(text)
    assert backend.compiled == texts
    for text in texts[2:]:
        ask(text)
    assert backend.compiled == texts  # those are kept
    ask(texts[1])
    assert backend.compiled == [*texts, texts[1]]


def test_what_could_not_be_compiled_just_now_is_tried_again() -> None:
    backend = Backend()
    backend.is_busy = True
    engine = engine_of(backend)
    for name in ("a", "b"):
        engine.add(with_grammar(make_request(name, numbers(5), 3), "2 3"))
        found = settled(engine)
        assert (found.last[name, 0].error_code, found.last[name, 0].error) == ("queue_full", "Later.")
    backend.is_busy = False
    engine.add(with_grammar(make_request("c", numbers(5), 3), "2 3"))
    assert len(settled(engine).tokens["c", 0]) == 3


def test_refusals() -> None:
    backend = Backend()
    engine = engine_of(backend)
    for name, text in (("a", "bad"), ("b", "broken")):
        engine.add(with_grammar(make_request(name, numbers(5), 3, num_choices=2), text))
    found = settled(engine)
    for key in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        assert found.last[key].error_code == "invalid_schema"
    assert found.last["a", 0].error == "The grammar of this request cannot be used: it is bad."
    with pytest.raises(RequestRefused, match="it is bad") as refused:  # without a second look
        engine.add(with_grammar(make_request("c", numbers(5), 3), "bad"))
    assert refused.value.code == "invalid_schema"
    with pytest.raises(RequestRefused, match="65537 bytes: it must have 1 to 65536"):
        engine.add(with_grammar(make_request("d", numbers(5), 3), "x" * 65_537))
    searching = replace(make_request("f", numbers(5), 3), beam=BeamParams(width=2))
    with pytest.raises(RequestRefused, match="A beam search cannot follow a grammar"):
        engine.add(with_grammar(searching, "2 3"))
    with pytest.raises(RequestRefused, match="llguidance is not installed"):
        engine_of(None).add(with_grammar(make_request("e", numbers(5), 3), "2 3"))


def test_an_overdue_compilation_is_given_up_and_an_abort_forgets_it() -> None:
    backend, now = Backend(), [0.0]
    backend.gate.clear()
    engine = engine_of(backend, clock=lambda: now[0])
    for name in ("a", "b", "c"):  # two threads: the third waits for one
        engine.add(with_grammar(make_request(name, numbers(5), 3), f"2 {ord(name)}"))
    engine.add(with_grammar(make_request("gone", numbers(5), 3), "2 1"))
    engine.step()
    engine.abort(RequestId("gone"))
    now[0] = COMPILE_TIMEOUT_S + 1
    found = Transcript()
    found.take(engine.step())
    assert [found.last[name, 0].error_code for name in "abc"] == ["invalid_schema"] * 2 + ["queue_full"]
    assert "or try again later if the machine" in (found.last["a", 0].error or "")
    assert not engine.has_work() and not engine.has_timers()
    backend.gate.set()


def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    """Clients that leave take no places of the queue with them."""
    backend = Backend()
    backend.gate.clear()
    engine = engine_of(backend, max_waiting=1000)
    for number in range(256):
        engine.add(with_grammar(make_request(f"a{number}", numbers(5), 3), f"2 {3 + number}"))
    with pytest.raises(RequestRefused, match="256 grammars are waiting to be compiled"):
        engine.add(with_grammar(make_request("b", numbers(5), 3), "3 3"))
    engine.add(with_grammar(make_request("also", numbers(5), 3), "2 103"))
    for number in range(256):
        assert engine.abort(RequestId(f"a{number}"))
    engine.add(with_grammar(make_request("b", numbers(5), 3), "3 3"))
    backend.gate.set()
    found = settled(engine)
    assert (len(found.tokens["also", 0]), len(found.tokens["b", 0])) == (3, 3)
    assert set(backend.compiled) == {"2 3", "2 4", "2 103", "3 3"}  # two threads had begun with the first two


def test_an_abort_of_the_last_one_that_waits_leaves_no_timer() -> None:
    backend = Backend()
    backend.gate.clear()
    engine = engine_of(backend)
    engine.add(with_grammar(make_request("a", numbers(5), 3), "2 3"))
    assert engine.has_timers()
    engine.abort(RequestId("a"))
    assert not engine.has_timers()
    backend.gate.set()


def test_news_of_a_grammar_that_nobody_waits_for_do_not_keep_the_loop_awake() -> None:
    backend = Backend()
    backend.gate.clear()
    engine = engine_of(backend)
    engine.add(with_grammar(make_request("a", numbers(5), 3), "2 3"))
    engine.abort(RequestId("a"))
    backend.gate.set()
    deadline = time.monotonic() + 20
    while not engine._grammars.has_news:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.step()
    assert not engine._grammars.has_news


def test_waiting_for_a_compile_thread_is_no_compiling() -> None:
    """Others' slow grammars must not look like one's own."""
    gates, now = {text: threading.Event() for text in ("2 3", "3 3", "5 3")}, [0.0]

    class Gated(Backend):
        def compile(self, grammar: Grammar) -> Rising:
            begun.append(grammar.text)
            assert gates[grammar.text].wait(20)
            return super().compile(grammar)

    begun: list[str] = []
    engine = engine_of(Gated(), clock=lambda: now[0])
    for text in gates:
        engine.add(with_grammar(make_request(text, numbers(5), 3), text))
    now[0] = COMPILE_TIMEOUT_S - 1
    gates["2 3"].set()
    deadline = time.monotonic() + 20
    while "5 3" not in begun:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    now[0] = COMPILE_TIMEOUT_S + 1
    found = Transcript()
    found.take(engine.step())
    assert {name: end.error_code for (name, _), end in found.last.items()} == {"3 3": "invalid_schema"}
    gates["5 3"].set()
    assert len(settled(engine, found).tokens["5 3", 0]) == 3
    gates["3 3"].set()


def test_a_choice_that_another_group_has_begun_goes_on() -> None:
    request = with_grammar(make_request("a", numbers(20), 12, temperature=1.0), "3 8")
    whole = settled_tokens(request)
    for count in range(1, len(whole) - 1):
        begun = replace(request, begun=(BegunChoice(choice=0, token_ids=tuple(whole[:count])),))
        assert settled_tokens(begun) == whole[count:]
    wrong = replace(request, begun=(BegunChoice(choice=0, token_ids=(1,)),))
    engine = engine_of(Backend())
    engine.add(wrong)
    assert settled(engine).last["a", 0].error_code == "invalid_schema"


def test_the_loop_wakes_up_for_a_compiled_grammar() -> None:
    backend = Backend()
    backend.gate.clear()
    engine = engine_of(backend)
    ended = threading.Event()
    outputs: list[StepOutput] = []

    def take(output: StepOutput) -> None:
        outputs.append(output)
        if any(chunk.finish_reason is not None for chunk in output.chunks):
            ended.set()

    loop = EngineLoop(engine, take)
    loop.start()
    try:
        loop.submit(with_grammar(make_request("a", numbers(5), 3), "2 3"))
        time.sleep(0.05)
        released_s = time.monotonic()
        backend.gate.set()
        assert ended.wait(10)
        assert time.monotonic() - released_s < 0.9  # not by the timer of an idle loop
    finally:
        loop.stop(10)


def settled_tokens(request: GenerateRequest) -> list[int]:
    engine = engine_of(Backend())
    engine.add(request)
    return settled(engine).tokens["a", 0]
