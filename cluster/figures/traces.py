"""Request traces: who asked when, for how many tokens, and which beginnings were equal.

Two forms are read, told apart by the file's ending:

- `.jsonl`, as Mooncake published (FAST 2025): a request a line with `timestamp` (ms), `input_length`,
  `output_length` (tokens) and `hash_ids`, one id for each 512 prompt tokens; equal ids mean equal prefixes.
- `.csv`, as the Azure LLM inference traces (2023): TIMESTAMP, ContextTokens, GeneratedTokens; no prefixes.

    requests = scaled(read_trace(file), length_divisor=32, rate_divisor=10)[:300]
    prompt = prompt_tokens(requests[0], vocab_size=49152)

A small machine replays a trace scaled: lengths divided by one factor, arrivals spread by another. The prefix
structure stays: an id stands for a run of tokens that only depends on the id. Texts are not in the traces;
tokens are made up.
"""

from __future__ import annotations

import csv
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from workers.regular_file import open_regular

MOONCAKE_BLOCK_TOKENS = 512
FIRST_TOKEN = 10  # ids below are special tokens in many vocabularies
_MAX_LINE_BYTES = 1 << 20
_MAX_TOKENS = 1 << 24
_MOST_MS = 1e15  # of a timestamp


class TraceError(ValueError):
    """A file that is not a trace. The text names file, line and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Without `prefix_ids` its prompt has no token run in common with any other."""

    number: int  # place in the file, from 0
    arrival_s: float  # after the first request of the file
    prompt_tokens: int  # at least 1
    output_tokens: int  # at least 1
    prefix_ids: tuple[int, ...] = ()  # in order; together they cover the prompt
    tokens_per_id: float = MOONCAKE_BLOCK_TOKENS  # prompt tokens that an id stands for


def read_trace(file: Path, *, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests, or all, by arrival. Raises TraceError, and OSError for the file itself."""
    readers: dict[str, Callable[[Iterable[str]], Iterator[TraceRequest]]] = {
        ".jsonl": _mooncake,
        ".csv": _azure,
    }
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise TraceError(f"{file}: a trace is a .jsonl (Mooncake) or a .csv (Azure) file")
    try:
        with open_regular(file) as stream:
            requests = list(islice(reader(_lines(stream)), limit))
    except TraceError as error:
        raise TraceError(f"{file}: {error}") from error
    if not requests:
        raise TraceError(f"{file}: no requests in it")
    return requests


def scaled(
    requests: Iterable[TraceRequest], *, length_divisor: float = 1.0, rate_divisor: float = 1.0
) -> list[TraceRequest]:
    """The same requests with lengths and arrival rate divided; every length stays at least 1.
    Raises TraceError for lengths beyond those of any trace."""
    for name, divisor in (("length_divisor", length_divisor), ("rate_divisor", rate_divisor)):
        if not 0 < divisor < float("inf"):
            raise ValueError(f"{name} is {divisor}: it must be above 0")
    made = [
        replace(
            request,
            arrival_s=request.arrival_s * rate_divisor,
            prompt_tokens=max(1, round(request.prompt_tokens / length_divisor)),
            output_tokens=max(1, round(request.output_tokens / length_divisor)),
            tokens_per_id=request.tokens_per_id / length_divisor,
        )
        for request in requests
    ]
    for request in made:
        if max(request.prompt_tokens, request.output_tokens) > _MAX_TOKENS:
            raise TraceError(
                f"request {request.number} has {request.prompt_tokens:,} + {request.output_tokens:,} tokens "
                f"at a length divisor of {length_divisor:g}, at most {_MAX_TOKENS:,} are allowed"
            )
    return made


def prompt_tokens(request: TraceRequest, vocab_size: int) -> list[int]:
    """Its made-up prompt. Two requests share the tokens of their common beginning of ids, and no others.

    Ids are drawn from 10 .. vocab_size - 1, always the same for the same request.
    """
    total = request.prompt_tokens
    if not request.prefix_ids:
        return _run(f"request {request.number}", total, vocab_size)
    tokens: list[int] = []
    last = len(request.prefix_ids) - 1
    for place, prefix_id in enumerate(request.prefix_ids):
        # Ids are of chains, so an id is always in the same place and its run always equally long.
        end = total if place == last else min(total, round((place + 1) * request.tokens_per_id))
        if end > len(tokens):
            tokens += _run(f"id {prefix_id}", end - len(tokens), vocab_size)
    return tokens


def _run(name: str, length: int, vocab_size: int) -> list[int]:
    """Tokens that depend on the name alone; a shorter run is the beginning of a longer one."""
    if vocab_size <= FIRST_TOKEN:
        raise ValueError(f"a vocabulary of {vocab_size} is too small: more than {FIRST_TOKEN} are needed")
    numbers = array("I", hashlib.shake_128(name.encode()).digest(4 * length))
    span = vocab_size - FIRST_TOKEN
    return [FIRST_TOKEN + number % span for number in numbers]


def _lines(stream: BufferedReader) -> Iterator[str]:
    number = 0
    while line := stream.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise TraceError(f"line {number}: more than {_MAX_LINE_BYTES} bytes")
        try:
            yield line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise TraceError(f"line {number}: no text in UTF-8, from byte {error.start} on") from error


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    before = first = None
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        place = f"line {number + 1}"
        try:
            entry: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{place}: no JSON ({error})") from error
        if not isinstance(entry, dict):
            raise TraceError(f"{place}: {type(entry).__name__} instead of an object")
        prompt = _count(entry.get("input_length"), f"{place}: input_length")
        output = _count(entry.get("output_length"), f"{place}: output_length")
        stamp: Any = entry.get("timestamp")
        if type(stamp) not in (int, float) or not -_MOST_MS < stamp < _MOST_MS:
            raise TraceError(f"{place}: timestamp is {repr(stamp)[:40]}, it must be milliseconds")
        ids = entry.get("hash_ids")
        if not isinstance(ids, list) or any(type(found) is not int for found in ids):
            raise TraceError(f"{place}: hash_ids is not a list of integers")
        if len(ids) != (needed := -(-prompt // MOONCAKE_BLOCK_TOKENS)):
            raise TraceError(
                f"{place}: {len(ids)} hash_ids for {prompt} tokens, {needed} blocks of "
                f"{MOONCAKE_BLOCK_TOKENS} cover them"
            )
        first = stamp if first is None else first
        before = _in_order(stamp, before, place)
        yield TraceRequest(
            number=number,
            arrival_s=(stamp - first) / 1e3,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_ids=tuple(ids),
        )


def _azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    rows = csv.reader(lines)
    heading = [name.strip() for name in next(_rows(rows), [])]
    wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    if missing := [name for name in wanted if name not in heading]:
        raise TraceError(f"line 1: no column {', '.join(missing)}")
    columns = [heading.index(name) for name in wanted]
    before = first = None
    number = 0
    for row in _rows(rows):
        if not row:
            continue
        place = f"line {rows.line_num}"
        if len(row) != len(heading):
            raise TraceError(f"{place}: {len(row)} columns instead of {len(heading)}")
        stamp, prompt, output = (row[column] for column in columns)
        try:
            moment = datetime.fromisoformat(stamp.strip())
        except ValueError as error:
            raise TraceError(f"{place}: TIMESTAMP {stamp[:40]!r} is no date and time") from error
        # Without a zone the hours of this machine's, some of which are repeated or left out, are not meant.
        at = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        first = at if first is None else first
        before = _in_order(at, before, place)
        yield TraceRequest(
            number=number,
            arrival_s=at - first,
            prompt_tokens=_count(_integer(prompt), f"{place}: ContextTokens"),
            output_tokens=_count(_integer(output), f"{place}: GeneratedTokens"),
        )
        number += 1


def _rows(reader: Any) -> Iterator[list[str]]:
    """The rows that a reader of CSV has left."""
    try:
        yield from reader
    except csv.Error as error:
        raise TraceError(f"line {reader.line_num}: {error}") from error


def _integer(text: str) -> object:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


def _count(value: object, name: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
        raise TraceError(
            f"{name} is {repr(value)[:40]}, it must be a number of tokens from 1 to {_MAX_TOKENS}"
        )
    return value


def _in_order(stamp: float, before: float | None, place: str) -> float:
    if before is not None and stamp < before:
        raise TraceError(f"{place}: earlier than the request before it")
    return stamp


def mean_lengths(requests: Sequence[TraceRequest]) -> tuple[float, float]:
    """Mean prompt and output tokens."""
    count = len(requests)
    return (
        sum(request.prompt_tokens for request in requests) / count,
        sum(request.output_tokens for request in requests) / count,
    )


def mean_rate(requests: Sequence[TraceRequest]) -> float:
    """Requests a second from the first arrival to the last; inf when all come at once."""
    span = requests[-1].arrival_s - requests[0].arrival_s
    return len(requests) / span if span > 0 else float("inf")
