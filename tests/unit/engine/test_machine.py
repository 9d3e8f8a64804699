"""The engine under random commands: invariants after each, every token right, nothing left at the end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.engine.toy import Transcript, make_engine, make_request, numbers, reference, replay
from tests.unit.engine.toy_reference import reference_scores, reference_search
from workers.config import SpeculativeConfig
from workers.decoding.drafter import METHODS, MODEL_METHODS
from workers.engine.step import SequenceSlice
from workers.types import (
    BeamParams,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    RequestId,
    RequestRefused,
)

EOS = (3,)


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, and spoils values of a sequence now and then."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_step_tokens=st.sampled_from([1, 3, 8, 64]),
        max_running=st.sampled_from([1, 3, 64]),
        max_prefill_chunk=st.sampled_from([None, 1, 5]),
        prefix_reuse=st.booleans(),
        expected=st.sampled_from([1, 8]),
        drafts=st.sampled_from([0, 1, 4]),
        method=st.sampled_from([*METHODS, *MODEL_METHODS]),
        plans_ahead=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        max_running: int,
        max_prefill_chunk: int | None,
        prefix_reuse: bool,
        expected: int,
        drafts: int,
        method: str,
        plans_ahead: bool,
    ) -> None:
        self.engine, self.executor = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            max_prefill_chunk=max_prefill_chunk,
            prefix_reuse=prefix_reuse,
            expected_output_tokens=expected,
            max_waiting=6,
            speculative=SpeculativeConfig(method=method, max_draft_tokens=drafts) if drafts else None,
            eos=EOS,
            plans_ahead=plans_ahead,
        )
        self.plans_ahead = plans_ahead
        self.capacity, self.block_size = num_blocks * block_size, block_size
        self.max_rows = (max_step_tokens, max_running)
        self.requests: dict[RequestId, GenerateRequest] = {}
        self.aborted: set[RequestId] = set()
        self.transcript = Transcript()
        self.known: set[bytes] = set()
        self.is_spoiling = False
        self.num_spoiled = 0
        self.executor.spoil = self.spoil

    def spoil(self, piece: SequenceSlice) -> str | None:
        is_hit = self.is_spoiling and piece.sample is not None
        self.is_spoiling = self.is_spoiling and not is_hit
        self.num_spoiled += is_hit
        return "not a number" if is_hit else None

    @rule(
        length=st.integers(1, 40),
        family=st.integers(0, 1),
        max_tokens=st.integers(0, 20),
        num_choices=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 1]),
        temperature=st.sampled_from([0.0, 1.0]),
        scores=st.sampled_from([None, None, 2]),
        min_tokens=st.integers(0, 3),
        top_k=st.sampled_from([0, 2, 4]),
        width=st.sampled_from([None, None, 1, 2, 4, 7]),
        length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 2.0]),
        early_stopping=st.sampled_from(EarlyStopping),
        is_plain=st.sampled_from([True, True, False]),
    )
    def add(
        self,
        length: int,
        family: int,
        max_tokens: int,
        num_choices: int,
        priority: int,
        temperature: float,
        scores: int | None,
        min_tokens: int,
        top_k: int,
        width: int | None,
        length_penalty: float,
        early_stopping: EarlyStopping,
        is_plain: bool,
    ) -> None:
        beam = None
        if self.plans_ahead and is_plain:  # one that is not has no step planned ahead as long as it is here
            scores, min_tokens, width = None, 0, None
        if width is not None:
            beam = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
            num_choices, temperature, max_tokens = min(num_choices, width), 0.0, max(max_tokens, 1)
        request = make_request(
            f"r{len(self.requests)}",
            numbers(length, family),
            max_tokens,
            num_choices=num_choices,
            priority=priority,
            temperature=temperature,
            num_prompt_logprobs=scores,
            min_tokens=min(min_tokens, max_tokens),
            top_k=top_k,
            beam=beam,
        )
        try:
            self.engine.add(request)
        except RequestRefused as refused:
            if refused.code == "kv_pool_too_small":
                blocks = -(-(length + max(0, max_tokens - 1)) // self.block_size)
                own = blocks - length // self.block_size  # of each hypothesis, at worst
                assert (blocks + ((width or 1) - 1) * own) * self.block_size > self.capacity
            elif refused.code == "beam_width_too_large":
                assert width is not None and width > min(self.max_rows)
            else:
                assert refused.code == "queue_full"
            return
        self.requests[request.request_id] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            had_work = self.engine.has_work()
            computed = self.executor.num_computed_tokens
            self.transcript.take(self.engine.step())
            assert (self.executor.num_computed_tokens > computed) == had_work  # every step gets on
            self.engine.check_integrity()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        request_id = list(self.requests)[pick % len(self.requests)]
        was_there = self.engine.unfinished_choices(request_id) != ()
        assert self.engine.abort(request_id) == was_there
        if was_there:
            self.aborted.add(request_id)

    @rule()
    def spoil_next(self) -> None:
        self.is_spoiling = True

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        replay(self.engine.take_events(), self.known)
        assert len(self.known) >= self.engine.stats().cached_blocks

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5_000):
            if not self.engine.has_work():
                break
            self.transcript.take(self.engine.step())
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.active_blocks, stats.waiting_tokens, stats.running_tokens) == (0, 0, 0)
        replay(self.engine.take_events(), self.known)
        assert len(self.known) == stats.cached_blocks
        assert stats.finished_error_total <= self.num_spoiled
        for request_id, request in self.requests.items():
            for choice in range(request.num_choices):
                self.check_choice(request_id, choice, request)

    def check_choice(self, request_id: RequestId, choice: int, request: GenerateRequest) -> None:
        if request.beam is not None:
            self.check_found(request_id, choice, request)
            return
        expected = reference(request, choice, EOS)
        tokens = self.transcript.tokens.get((request_id, choice), [])
        assert tokens == expected[: len(tokens)]
        last = self.transcript.last.get((request_id, choice))
        if last is None:
            assert request_id in self.aborted
        elif last.finish_reason is FinishReason.ERROR:
            assert last.error_code == "numerical_error"
        else:
            assert tokens == expected
            first = self.transcript.first[request_id, choice]
            wants_scores = choice == 0 and request.sampling.num_prompt_logprobs is not None
            assert first.prompt_logprobs == (reference_scores(request) if wants_scores else None)

    def check_found(self, request_id: RequestId, choice: int, request: GenerateRequest) -> None:
        """A choice of a beam search."""
        last = self.transcript.last.get((request_id, choice))
        if last is None:
            assert request_id in self.aborted
        elif last.finish_reason is FinishReason.ERROR:
            assert (last.token_ids, last.error_code) == ((), "numerical_error")
        else:
            expected = reference_search(request, EOS)[choice]
            assert (last.token_ids, last.score) == (expected.token_ids, expected.score)
            wants_scores = choice == 0 and request.sampling.num_prompt_logprobs is not None
            first = self.transcript.first[request_id, choice]
            assert first.prompt_logprobs == (reference_scores(request) if wants_scores else None)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
