"""A deterministic toy model over a paged pool, and small makers of requests and engines.

The toy's "keys and values" of a position are a number made of the token there, the position, and the number
at the position before, read back through the block table. A token is chosen from all the numbers of its
context. So a wrong block, position, stale content or a prefix with another history changes the output.
Reference tokens come from `reference()`, which has no blocks at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.unit.engine.toy_model import (
    VOCAB,
    ToyDraft,
    ToyHeads,
    candidates_of,
    choose,
    content_of,
    contents_of,
    score_of,
    seen_of,
)
from tests.unit.engine.toy_plans import filled_in, snapshot
from workers.config import CacheConfig, ScheduleConfig, SpeculativeConfig, TransferConfig
from workers.decoding.beam_search import Candidate
from workers.engine.engine import Engine
from workers.engine.exchange import ExchangeSetup
from workers.engine.fetch import KVPeers
from workers.engine.grammars import GrammarBackend
from workers.engine.leases import OfferListener
from workers.engine.request import EngineLimits
from workers.engine.step import Sampled, SampleTask, SequenceSlice, SliceResult, StepPlan, StepResult
from workers.types import (
    BeamParams,
    BlockEvent,
    BlockEventKind,
    FinishReason,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)


def reference(
    request: GenerateRequest, choice: int = 0, eos: Sequence[int] = (), window: int | None = None
) -> list[int]:
    """What a choice must give: the whole history computed anew for each token. window: what the last rows see
    of it."""
    sampling = request.sampling
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        task = SampleTask(
            params=sampling,
            choice=choice,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=output,
            end_token_ids=sorted(ends),
        )
        contents = contents_of((*request.prompt_token_ids, *output))
        output.append(choose(seen_of(contents, window), task))
        if output[-1] in ends:
            break
    return output


LIMITS = EngineLimits(vocab_size=VOCAB, max_model_len=4096, eos_token_ids=())


class ToyExecutor:
    """Implements workers.engine.step.Executor; keeps every plan it ran."""

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._window = window
        self._pool: list[int | None] = [None] * (num_blocks * block_size)
        self.plans: list[StepPlan] = []
        self.num_computed_tokens = 0
        self.draft_heads: ToyHeads | None = ToyHeads()
        self.draft_model: ToyDraft | None = ToyDraft(self._pool, block_size)
        self._started: list[ToyStep] = []  # in this order, and not computed yet
        self._drawn: list[int] = []  # ids of the step computed last, by row of logits
        self.is_exact = True  # slices have the blocks that they need and no others
        self.before_step: Callable[[StepPlan], None] = lambda plan: None  # may raise
        self.spoil: Callable[[SequenceSlice], str | None] = lambda piece: None  # error of a slice

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def close(self) -> None:
        pass

    def start(self, plan: StepPlan) -> ToyStep:
        """Computed as late as can be: when it is asked for, after what started before it."""
        assert any(piece.sample for piece in plan.slices) and not plan.num_searches
        self._started.append(ToyStep(self, snapshot(plan)))
        return self._started[-1]

    def execute(self, plan: StepPlan) -> StepResult:
        return self.compute(snapshot(plan))

    def compute(self, plan: StepPlan) -> StepResult:
        """A plan whose lists are its own."""
        drawn, self._drawn = self._drawn, []
        self.before_step(plan)
        plan = replace(plan, slices=[filled_in(piece, drawn) for piece in plan.slices])
        self.plans.append(plan)
        self._check_writes(plan)
        size = self._block_size
        for source, target in plan.copy_blocks:
            self._pool[target * size : (target + 1) * size] = self._pool[source * size : (source + 1) * size]
        for piece in plan.slices:
            self._write(piece)
        if self.draft_heads is not None:
            self.draft_heads.step_number, self.draft_heads.seen = plan.number, []
        results = [self._result(piece) for piece in plan.slices]
        for piece, result in zip(plan.slices, results, strict=True):
            if piece.sample is not None:
                self._drawn.append(result.sampled[0].token_id if result.sampled else 0)
        return StepResult(slices=results)

    def forget_started(self) -> None:
        """Steps whose results nobody will ask for: they compute nothing."""
        self._started.clear()

    def take_turn(self, step: ToyStep) -> None:
        """Its results are asked for."""
        assert self._started.pop(0) is step, "results are asked for out of order"

    def _slot(self, piece: SequenceSlice, position: int) -> int:
        return (
            piece.block_table[position // self._block_size] * self._block_size + position % self._block_size
        )

    def _check_writes(self, plan: StepPlan) -> None:
        """Nobody writes where another slice reads or writes."""
        size = self._block_size
        written: dict[int, int] = {}
        for index, piece in enumerate(plan.slices):
            end = piece.start + len(piece.token_ids)
            assert len(piece.token_ids) > 0
            num_spare = len(piece.block_table) - -(-end // size)
            assert num_spare == 0 or (num_spare > 0 and not self.is_exact), "not the blocks of the slice"
            for place in range(piece.start // size, -(-end // size)):
                block = piece.block_table[place]
                assert written.setdefault(block, index) == index, f"block {block} written by two slices"
        for index, piece in enumerate(plan.slices):
            first = 0 if self._window is None else max(0, piece.start - self._window + 1)
            for block in piece.block_table[first // size :]:
                assert written.get(block, index) == index, f"block {block} written by {written[block]}"

    def _write(self, piece: SequenceSlice) -> None:
        for row, token_id in enumerate(piece.token_ids):
            before = self._contents(piece, row)
            self._pool[self._slot(piece, piece.start + row)] = content_of(
                before[-1] if before else 0, token_id, len(before)
            )
        self.num_computed_tokens += len(piece.token_ids)

    def _contents(self, piece: SequenceSlice, row: int, *, with_own: bool = False) -> list[int]:
        """What a row of a slice sees before itself."""
        first_draft = len(piece.token_ids) - piece.num_drafts
        way = [row] if with_own else []
        while row > 0:
            is_branch = piece.draft_parents is not None and row >= first_draft
            row = first_draft + piece.draft_parents[row - first_draft] if is_branch else row - 1
            way.append(row)
        places = [*range(piece.start), *(piece.start + each for each in reversed(way))]
        num_hidden = 0
        if self._window is not None:
            num_hidden = max(0, len(places) - self._window + (not with_own))
        found = [self._pool[self._slot(piece, place)] for place in places[num_hidden:]]
        assert None not in found, f"never written before row {row}"
        return [0] * num_hidden + found

    def _result(self, piece: SequenceSlice) -> SliceResult:
        seen: list[list[int]] = []
        if self.draft_heads is not None:
            self.draft_heads.seen.append(seen)
        error = self.spoil(piece)
        if error is not None:
            code = "invalid_schema" if piece.sample and piece.sample.allowed else "numerical_error"
            return SliceResult(error=error, error_code=code)
        sampled = []
        candidates: tuple[Candidate, ...] = ()
        first = len(piece.token_ids) - 1 - piece.num_drafts
        for row, task in enumerate(piece.sample_tasks(), first):
            contents = self._contents(piece, row, with_own=True)
            known = len(task.prompt_token_ids) + task.num_new
            assert len(contents) == known, f"{len(contents)} computed of {known} known tokens"
            if task.num_candidates:
                candidates = candidates_of(contents, task)
                continue
            token_id = choose(contents, task)
            seen.append([*contents, content_of(contents[-1], token_id, known)])
            wants = task.params.num_logprobs is not None
            score = score_of(contents, token_id) if wants else None
            sampled.append(Sampled(token_id=token_id, logprob=score))
        scores = [
            score_of(self._contents(piece, row, with_own=True), target)
            for row, target in enumerate(piece.prompt_targets or ())
        ]
        result = SliceResult(sampled=sampled, candidates=candidates, prompt_logprobs=scores)
        return result if piece.draft_parents is None else self._come_true(piece, result)

    def _come_true(self, piece: SequenceSlice, result: SliceResult) -> SliceResult:
        """Of a tree what was sampled on the way that came true, whose contents move together."""
        assert piece.draft_parents is not None
        rows = [0]
        for row, (parent, draft) in enumerate(zip(piece.draft_parents, piece.drafts, strict=True), 1):
            if parent + 1 == rows[-1] and draft == result.sampled[rows[-1]].token_id:
                rows.append(row)
        first = piece.start + len(piece.token_ids) - 1 - piece.num_drafts
        moved = [self._pool[self._slot(piece, first + row)] for row in rows]
        for place in range(piece.num_drafts + 1):
            content = moved[place] if place < len(moved) else None
            self._pool[self._slot(piece, first + place)] = content
        return replace(result, sampled=[result.sampled[row] for row in rows], rows=rows)


class ToyStep:
    """Implements workers.engine.step.StartedStep."""

    def __init__(self, executor: ToyExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan

    def result(self) -> StepResult:
        self._executor.take_turn(self)
        return self._executor.compute(self._plan)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_step_tokens: int = 512,
    max_running: int = 128,
    max_prefill_chunk: int | None = None,
    max_waiting: int = 2048,
    expected_output_tokens: int = 128,
    prefix_reuse: bool = True,
    max_model_len: int = 4096,
    eos: tuple[int, ...] = (),
    clock: Callable[[], float] = lambda: 0.0,
    peers: KVPeers | None = None,
    on_offer: OfferListener = lambda *_: None,
    transfer: TransferConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    grammars: GrammarBackend | None = None,
    window: int | None = None,
    recompute_past: int | None = None,
    plans_ahead: bool = False,
    make_executor: type[ToyExecutor] = ToyExecutor,
) -> tuple[Engine, ToyExecutor]:
    executor = make_executor(num_blocks, block_size, window)
    engine = Engine(
        limits=EngineLimits(
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=eos,
            is_prefix_reusable=recompute_past is None,
            window=window,
            turns_by_length=recompute_past is not None,
            recompute_past=recompute_past,
        ),
        cache=CacheConfig(block_size=block_size, prefix_reuse=prefix_reuse),
        schedule=ScheduleConfig(
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            max_prefill_chunk=max_prefill_chunk,
            max_waiting=max_waiting,
            expected_output_tokens=expected_output_tokens,
        ),
        executor=executor,
        starter=executor if plans_ahead else None,
        speculative=speculative,
        grammars=grammars,
        clock=clock,
        exchange=ExchangeSetup(peers=peers, on_offer=on_offer, transfer=transfer or TransferConfig()),
    )
    return engine, executor


def make_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    num_choices: int = 1,
    priority: int = 0,
    cache_salt: str = "",
    temperature: float = 0.0,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
    top_k: int = 0,
    beam: BeamParams | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            top_k=top_k,
        ),
        num_choices=num_choices,
        beam=beam,
        priority=priority,
        cache_salt=cache_salt,
    )


def numbers(count: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of `count` tokens; different seeds share no block."""
    return tuple((seed * 41 + i * i * 7 + i * 13 + 5) % VOCAB for i in range(count))


class Transcript:
    """What the chunks of a run say, by (request id, choice)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprob]] = {}
        self.first: dict[tuple[str, int], TokenChunk] = {}
        self.last: dict[tuple[str, int], TokenChunk] = {}

    def take(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            key = (chunk.request_id, chunk.choice)
            assert key not in self.last, f"{key} goes on after its end"
            self.first.setdefault(key, chunk)
            self.tokens.setdefault(key, []).extend(chunk.token_ids)
            self.logprobs.setdefault(key, []).extend(chunk.logprobs or ())
            if chunk.finish_reason is not None:
                self.last[key] = chunk

    def reason(self, name: str, choice: int = 0) -> FinishReason | None:
        return self.last[name, choice].finish_reason

    def cached(self, name: str, choice: int = 0) -> int:
        return self.first[name, choice].num_cached_tokens


def run(engine: Engine, transcript: Transcript | None = None, max_steps: int = 10_000) -> Transcript:
    """Steps until idle, with the invariants checked after every step."""
    transcript = transcript or Transcript()
    for _ in range(max_steps):
        if not engine.has_work():
            return transcript
        transcript.take(engine.step())
        engine.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps")


def replay(events: Sequence[BlockEvent], known: set[bytes] | None = None) -> set[bytes]:
    """The hashes that a reader of the event log believes in. Checks that the log says nothing twice."""
    known = set() if known is None else known
    for event in events:
        for block_hash in event.block_hashes:
            if event.kind is BlockEventKind.STORED:
                assert block_hash not in known
                known.add(block_hash)
            else:
                known.remove(block_hash)
    return known
