"""The model's own answers to prompts, kept in a file that grows answer by answer and can be gone on with.

    {"target_hash": ..., "seed": ..., "count": ..., "asked": ..., "max_tokens": ...}
    {"number": 0, "part": "training", "prompt_ids": [...], "answer_ids": [...]}
    ...

An answer ends at an end id, which is part of it, or after `max_tokens`. Answers of a held-out part are
greedy; of the others every third is sampled, so that texts differ more. Which answers share a step depends
on where the writing was interrupted, and in bfloat16 that may change a token now and then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig
from workers.engine.engine import Engine
from workers.progress import Progress
from workers.runtime.launch import LocalGroup
from workers.training.answers import answers_to
from workers.training.asking import Asking, read_or_ask, stored_prompts
from workers.training.prompts import Part, Prompt, TextError
from workers.types import GenerateRequest, RequestId, SamplingParams

BATCH = 32  # answers at the same time
_SAMPLED_EVERY = 3
_TEMPERATURE = 0.7
_MAX_WAITING = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the texts of a file are; its first line."""

    target_hash: str  # `Checkpoint.model_hash` of the model that wrote them
    seed: int  # of prompts and sampling
    count: int  # prompts that are made from templates
    asked: int  # times that the model is asked for one
    max_tokens: int  # longest answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt, in the form that the model is given, and its answer."""

    number: int  # of the prompt
    part: Part
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def read_texts(file: Path, header: Header) -> list[Text]:
    """Texts that were written, by number; [] when there is no file, or only the beginning of its first line.
    A last line that was cut is left out.

    Raises TextError when the file belongs to another header, OSError."""
    if not file.exists():
        return []
    content, expected = file.read_text(encoding="utf-8"), json.dumps(asdict(header))
    if expected.startswith(content):
        return []
    first, *lines = content.split("\n")[:-1] or [content]
    if first != expected:
        raise TextError(f"{file} begins with {first[:200]!r}, not {expected}: delete it first")
    return sorted((_parse(line) for line in lines), key=lambda text: text.number)


def write_texts(
    file: Path, header: Header, prompts: Sequence[Prompt], *, folder: Path, threads: int, progress: Progress
) -> list[Text]:
    """Has the model in `folder` answer those prompts that the file has no answer to, and behind them those
    that it makes itself. Returns all texts.

    Raises TextError and ValueError as `read_or_ask`, OSError, and what loading a model raises."""
    done = {text.number for text in read_texts(file, header)}
    asked_for = file.with_name("prompts.json")
    if len(done) < len(prompts) + _num_stored(asked_for, header):
        _drop_cut_line(file)
        progress.start("loading the target to have it write")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = GroupConfig(
            model=ModelConfig(path=str(folder)),
            cache=CacheConfig(max_bytes=1 << 30),
            schedule=ScheduleConfig(max_running=BATCH, max_waiting=_MAX_WAITING),
            parallel=ParallelConfig(device="cpu", threads_per_rank=threads),
        )
        with LocalGroup(config) as group, file.open("a", encoding="utf-8") as stream:
            if not stream.tell():
                stream.write(json.dumps(asdict(header)) + "\n")
            engine = Engine(
                limits=group.facts.limits,
                cache=CacheConfig(block_size=group.facts.block_size),
                schedule=config.schedule,
                executor=group.executor,
            )
            own: list[Prompt] = []
            if header.asked:
                own = read_or_ask(asked_for, _asking(header), engine, tokenizer, progress)
            waiting = {
                number: (prompt.part, _chat_ids(tokenizer, prompt.text))
                for number, prompt in enumerate([*prompts, *own])
                if number not in done
            }
            for text in _answer(engine, header, waiting, progress):
                line = {
                    "number": text.number,
                    "part": text.part.value,
                    "prompt_ids": text.prompt_ids,
                    "answer_ids": text.answer_ids,
                }
                stream.write(json.dumps(line) + "\n")
                stream.flush()
    return read_texts(file, header)


def _answer(
    engine: Engine, header: Header, waiting: dict[int, tuple[Part, tuple[int, ...]]], progress: Progress
) -> Iterable[Text]:
    """Texts as they are finished."""
    numbers = {RequestId(f"text-{number}"): number for number in waiting}
    progress.start(f"writing: {len(waiting)} answers to go")
    num_tokens = 0
    requests = (
        _request(request_id, header, number, *waiting[number]) for request_id, number in numbers.items()
    )
    for num_done, answer in enumerate(answers_to(engine, requests), 1):
        number = numbers[answer.request_id]
        part, prompt_ids = waiting[number]
        num_tokens += len(answer.token_ids)
        if num_done % BATCH == 0:
            progress.start(f"writing: {num_done} of {len(waiting)} answers, {num_tokens} tokens")
        yield Text(number=number, part=part, prompt_ids=prompt_ids, answer_ids=answer.token_ids)


def _request(
    request_id: RequestId, header: Header, number: int, part: Part, prompt_ids: tuple[int, ...]
) -> GenerateRequest:
    is_sampled = part is Part.TRAINING and number % _SAMPLED_EVERY == 0
    sampling = SamplingParams(
        max_tokens=header.max_tokens,
        temperature=_TEMPERATURE if is_sampled else 0.0,
        seed=header.seed + number,
    )
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt_ids, sampling=sampling)


def _num_stored(file: Path, header: Header) -> int:
    """Prompts that the model has made; as long as it has not, more than none."""
    if not header.asked:
        return 0
    stored = stored_prompts(file, _asking(header))
    return 1 if stored is None else len(stored)


def _asking(header: Header) -> Asking:
    return Asking(target_hash=header.target_hash, count=header.asked, seed=header.seed)


def _chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The prompt as a chat of one turn, ready for the answer."""
    chat = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(written, add_special_tokens=False)["input_ids"])


def _drop_cut_line(file: Path) -> None:
    """What follows the last end of a line was being written when the writing was interrupted."""
    if file.exists():
        whole = file.read_bytes()
        with file.open("r+b") as stream:
            stream.truncate(whole.rfind(b"\n") + 1)


def _parse(line: str) -> Text:
    fields = json.loads(line)
    return Text(
        number=fields["number"],
        part=Part(fields["part"]),
        prompt_ids=tuple(fields["prompt_ids"]),
        answer_ids=tuple(fields["answer_ids"]),
    )
