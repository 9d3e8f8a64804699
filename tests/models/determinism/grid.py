"""Requests in an engine among others, in every circumstance, beside the same requests alone on one rank."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from tests.models.checkpoints import prompt_ids
from tests.models.determinism.thread_ranks import KernelSet, ThreadRanks, native
from tests.models.engine_groups import GREEDY, Answer, Client, InNoTime, collect
from workers.config import SpeculativeConfig
from workers.engine.proposals import DraftModel
from workers.engine.request import EngineLimits
from workers.runtime.medusa import MedusaRunner
from workers.types import BegunChoice, RequestId, SamplingParams

PROMPTS = tuple(tuple(prompt_ids(length, seed=length)) for length in (5, 17, 40, 75))
SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": replace(GREEDY, num_logprobs=5),
    "seeded": SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=7, num_logprobs=5),
    "penalties": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, num_logprobs=3),
    "scored prompt": replace(GREEDY, num_logprobs=0, num_prompt_logprobs=2),
}
NUM_BLOCKS = {"plenty": None, "short early": 9, "short late": 12}
SIDES: Mapping[str, Sequence[object]] = {
    "dtype": ("float32", "bfloat16"),
    "weights": ("none", "int8", "int4"),
    "kv": ("auto", "int8"),
    "tensor_parallel": (1, 2, 4),
    "chunk": (1, 7, 16, None),
    "prefix": ("none", "partial page", "full"),
    "batch": (1, 2, 5, 16, 32),
    "arrival": ("together", "scattered"),
    "memory": tuple(NUM_BLOCKS),
    "choices": (1, 3),
    "sampling": tuple(SAMPLINGS),
    "guesses": ("none", "prompt_lookup", "lookahead", "draft_model", "medusa"),
    "begun": (0, 1, 9),
    "prompt": tuple(range(len(PROMPTS))),
}


class Form(NamedTuple):
    """How a group holds the model: what answers depend on."""

    dtype: str
    weights: str = "none"  # as `model.quantization`
    kv: str = "auto"  # as `cache.dtype`


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One circumstance."""

    dtype: str
    weights: str
    kv: str
    tensor_parallel: int
    chunk: int | None  # most tokens of a prompt in a step
    prefix: str  # what the cache has of the prompt
    batch: int  # requests at the same time, this one among them
    arrival: str  # of the others
    memory: str  # with less of it sequences are preempted
    choices: int
    sampling: str
    guesses: str
    begun: int  # tokens of each choice that another group has given before
    prompt: int

    @property
    def form(self) -> Form:
        return Form(self.dtype, self.weights, self.kv)

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def is_legal(cell: Mapping[str, object]) -> bool:
    """A prompt is scored from the start; what is short of memory gets on slowly."""
    if cell["sampling"] == "scored prompt" and cell["begun"]:
        return False
    return cell["memory"] == "plenty" or cell["batch"] in (1, 2, 5)


class Grid:
    """Groups of one model, and what it says in any circumstance."""

    def __init__(self, folder: Path, heads: Path, kernels: KernelSet = native) -> None:
        self._folder, self._heads_folder, self._kernels = folder, heads, kernels
        self._groups: dict[tuple[Form, int], Group] = {}
        self._expected: dict[tuple[object, ...], list[Answer]] = {}

    def close(self) -> None:
        for group in self._groups.values():
            group.ranks.close()

    def expected(self, form: Form, prompt: int, sampling: str, choices: int) -> list[Answer]:
        """Each choice of a request alone on one rank, read in one step, without cache and guesses."""
        key = (form, prompt, sampling, choices)
        if key not in self._expected:
            client = self._group(form, 1).client(prefix_reuse=False)
            request_id = client.submit(PROMPTS[prompt], SAMPLINGS[sampling], num_choices=choices)
            answers = client.finish()
            self._expected[key] = [answers[request_id, choice] for choice in range(choices)]
        return self._expected[key]

    def found(self, cell: Cell, seed: int) -> list[Answer]:
        """Each choice, with mates of any kind; seed: of those."""
        rng = random.Random(seed)
        group, prompt, sampling = (
            self._group(cell.form, cell.tensor_parallel),
            PROMPTS[cell.prompt],
            SAMPLINGS[cell.sampling],
        )
        num_blocks = NUM_BLOCKS[cell.memory]
        client = group.client(
            guesses=cell.guesses,
            num_blocks=num_blocks,
            max_prefill_chunk=cell.chunk,
            expected_output_tokens=1 if num_blocks else 128,
        )
        if cell.prefix != "none":
            known = prompt if cell.prefix == "full" else prompt[: len(prompt) // 2]
            client.generate([known], replace(GREEDY, max_tokens=1))
        before = self.expected(cell.form, cell.prompt, cell.sampling, cell.choices)
        begun = tuple(
            BegunChoice(choice=choice, token_ids=tuple(answer.token_ids[: cell.begun]))
            for choice, answer in enumerate(before)
        )
        late: list[tuple[list[int], SamplingParams]] = []
        if num_blocks:  # older requests that grow
            for number in range(3):
                client.submit(prompt_ids(16, seed=200 + number), replace(GREEDY, max_tokens=60))
        place = rng.randrange(cell.batch)
        for number in range(cell.batch):
            if number == place:
                request_id = client.submit(
                    prompt, sampling, num_choices=cell.choices, begun=begun if cell.begun else ()
                )
                continue
            mate = _mate(rng)
            if cell.arrival == "scattered" and number % 2:
                late.append(mate)
            else:
                client.submit(*mate)
        answers = _finish(client, late, rng)
        assert num_blocks is None or client.engine.stats().preemptions_total > 0, "nothing was preempted"
        return [answers[request_id, choice] for choice in range(cell.choices)]

    def differs(self, cell: Cell, seed: int) -> str | None:
        """In what the request does not get the answer that it has alone; None: in nothing."""
        wanted = self.expected(cell.form, cell.prompt, cell.sampling, cell.choices)
        for choice, (answer, alone) in enumerate(zip(self.found(cell, seed), wanted, strict=True)):
            for name, ours, theirs in (
                ("ids", answer.token_ids, alone.token_ids[cell.begun :]),
                ("logprobs", answer.logprobs, alone.logprobs[cell.begun :]),
                ("prompt logprobs", answer.prompt_logprobs, alone.prompt_logprobs),
                ("finish", answer.finish, alone.finish),
            ):
                if ours != theirs:
                    return f"{name} of choice {choice}: {ours} instead of {theirs}"
        return None

    def _group(self, form: Form, tensor_parallel: int) -> Group:
        key = (form, tensor_parallel)
        if key not in self._groups:
            dtype = getattr(torch, form.dtype)
            ranks = ThreadRanks(
                self._folder, tensor_parallel, dtype, self._kernels, weights=form.weights, kv=form.kv
            )
            self._groups[key] = Group(ranks, self._folder, self._heads_folder)
        return self._groups[key]


class Group:
    """Engines over some ranks, each with a cache of its own."""

    def __init__(self, ranks: ThreadRanks, folder: Path, heads: Path) -> None:
        self.ranks, self._folder, self._heads_folder = ranks, folder, heads

    def client(self, guesses: str = "none", **options: int | bool | None) -> Client:
        model = self._draft if guesses == "draft_model" else None
        heads = self._heads if guesses == "medusa" else None
        return Client(
            self,  # type: ignore[arg-type]
            InNoTime(self.ranks.executor(model, heads)),
            clock=lambda: 0.0,
            speculative=SpeculativeConfig(method=guesses, model="here", max_draft_tokens=5),
            **options,  # type: ignore[arg-type]
        )

    @property
    def block_size(self) -> int:
        return self.ranks.block_size

    @property
    def limits(self) -> EngineLimits:
        checkpoint = self.ranks.checkpoint
        return EngineLimits(
            vocab_size=checkpoint.vocab_size,
            max_model_len=checkpoint.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            is_prefix_reusable=True,
        )

    @cached_property
    def _draft(self) -> DraftModel:
        """The model itself, always right about the best token."""
        return self.ranks.draft(self._folder)

    @cached_property
    def _heads(self) -> MedusaRunner:
        return self.ranks.heads(self._heads_folder)


def _mate(rng: random.Random) -> tuple[list[int], SamplingParams]:
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 24), temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(100)
    )
    return _prompt(rng.randint(1, 60), rng.randrange(50)), sampling


@cache
def _prompt(length: int, seed: int) -> list[int]:
    return prompt_ids(length, seed=300 + seed)


def _finish(
    client: Client, late: list[tuple[list[int], SamplingParams]], rng: random.Random
) -> dict[tuple[RequestId, int], Answer]:
    """Runs all requests to their end; the late ones come now and then."""
    answers: dict[tuple[RequestId, int], Answer] = {}
    while client.engine.has_work() or late:
        if late and (rng.random() < 0.4 or not client.engine.has_work()):
            client.submit(*late.pop())
        for chunk in client.engine.step():
            collect(answers.setdefault((chunk.request_id, chunk.choice), Answer()), chunk)
    client.engine.check_integrity()
    return answers
