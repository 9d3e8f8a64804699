"""Traces: both forms, scaling, and prompts that share exactly the beginnings the trace says."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.figures.traces import (
    TraceError,
    TraceRequest,
    mean_lengths,
    mean_rate,
    prompt_tokens,
    read_trace,
    scaled,
)

VOCAB = 1000


def mooncake(folder: Path, *entries: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def entry(timestamp: int, tokens: int, ids: list[int], output: int = 7) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}


def azure(folder: Path, *rows: str) -> Path:
    file = folder / "trace.csv"
    file.write_bytes("\r\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)).encode())
    return file


def test_mooncake(tmp_path: Path) -> None:
    file = mooncake(tmp_path, entry(500, 1024, [0, 1]), entry(2500, 600, [0, 2], output=9))
    assert read_trace(file) == [
        TraceRequest(number=0, arrival_s=0.0, prompt_tokens=1024, output_tokens=7, prefix_ids=(0, 1)),
        TraceRequest(number=1, arrival_s=2.0, prompt_tokens=600, output_tokens=9, prefix_ids=(0, 2)),
    ]
    assert len(read_trace(file, limit=1)) == 1


def test_azure(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.4799600,110,27")
    first, second = read_trace(azure(tmp_path, *rows))
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert (second.number, second.prompt_tokens, second.output_tokens) == (1, 110, 27)
    assert second.arrival_s == pytest.approx(0.5, abs=1e-6)
    assert second.prefix_ids == ()


def test_times_without_a_zone_are_in_order_where_clocks_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """02:59:50 and 03:00:10 of that night were an hour and 20 seconds apart in Berlin."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        _, second = read_trace(azure(tmp_path, "2023-10-29 02:59:50,1,1", "2023-10-29 03:00:10,1,1"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert second.arrival_s == 20.0


def test_lengths_and_rate_are_divided(tmp_path: Path) -> None:
    file = mooncake(tmp_path, entry(0, 1024, [0, 1], output=1), entry(1000, 600, [0, 2], output=40))
    first, second = scaled(read_trace(file), length_divisor=32, rate_divisor=10)
    assert (first.prompt_tokens, first.output_tokens, first.arrival_s) == (32, 1, 0.0)
    assert (second.prompt_tokens, second.output_tokens, second.arrival_s) == (19, 1, 10.0)
    assert second.tokens_per_id == 16


@pytest.mark.parametrize("divisor", [1, 32, 30, 7.5, 600])
def test_prompts_share_the_ids_they_have_in_common_and_no_more(tmp_path: Path, divisor: float) -> None:
    file = mooncake(tmp_path, entry(0, 2000, [0, 1, 2, 3]), entry(1, 1600, [0, 1, 9, 10]))
    one, other = scaled(read_trace(file), length_divisor=divisor)
    a, b = prompt_tokens(one, VOCAB), prompt_tokens(other, VOCAB)
    assert (len(a), len(b)) == (one.prompt_tokens, other.prompt_tokens)
    shared = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(b))
    assert shared == min(len(b), round(2 * 512 / divisor))
    assert all(10 <= token < VOCAB for token in a + b)


def test_the_same_ids_give_the_same_tokens_for_ever() -> None:
    request = TraceRequest(
        number=5, arrival_s=0.0, prompt_tokens=6, output_tokens=1, prefix_ids=(7, 8), tokens_per_id=3
    )
    assert prompt_tokens(request, 49152) == [40824, 47306, 12613, 18944, 37566, 21961]


def test_prompts_without_ids_have_nothing_in_common(tmp_path: Path) -> None:
    requests = read_trace(azure(tmp_path, *(f"2023-11-16 18:17:0{i},64,1" for i in range(5))))
    prompts = [prompt_tokens(request, VOCAB) for request in requests]
    assert all(a[:4] != b[:4] for a, b in pairwise(prompts))


def test_means(tmp_path: Path) -> None:
    requests = read_trace(mooncake(tmp_path, entry(0, 100, [0], output=2), entry(4000, 300, [0], output=4)))
    assert mean_lengths(requests) == (200.0, 3.0)
    assert mean_rate(requests) == 0.5
    assert mean_rate(requests[:1]) == float("inf")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1], "line 1: list instead of an object"),
        (entry(0, 0, []), "line 1: input_length is 0"),
        (entry(0, 513, [1]), r"line 1: 1 hash_ids for 513 tokens, 2 blocks"),
        (entry(0, 5, [1], output=True), "line 1: output_length is True"),
        ({**entry(0, 5, [1]), "timestamp": "now"}, "line 1: timestamp is 'now'"),
        ({**entry(0, 5, [1]), "timestamp": float("nan")}, "line 1: timestamp is nan"),
        ({**entry(0, 5, [1]), "timestamp": float("inf")}, "line 1: timestamp is inf"),
        ({**entry(0, 5, [1]), "timestamp": 10**400}, "line 1: timestamp is 10000"),
        (entry(0, 1 << 25, [1]), "line 1: input_length is 33554432, it must be a number of tokens from 1 to"),
        ({**entry(0, 5, [1]), "hash_ids": ["a"]}, "line 1: hash_ids is not"),
    ],
)
def test_mistakes_in_jsonl_are_named(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(mooncake(tmp_path, bad))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.csv"])
def test_a_line_without_an_end_is_not_read_to_it(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(1 << 42)  # zeros that take no room
    with pytest.raises(TraceError, match="line 1: more than 1048576 bytes"):
        read_trace(tmp_path / name)


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    for file in (mooncake(tmp_path, entry(0, 5, [1])), azure(tmp_path, "")):
        with file.open("ab") as stream:
            stream.write(b"4,\xff\n")
        with pytest.raises(TraceError, match="line 2: no text in UTF-8, from byte 2 on"):
            read_trace(file)


def test_requests_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: earlier"):
        read_trace(mooncake(tmp_path, entry(9, 5, [1]), entry(8, 5, [1])))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:17:03,1", "line 2: 2 columns"),
        ("yesterday,1,1", "line 2: TIMESTAMP 'yesterday'"),
        ("2023-11-16 18:17:03,-4,1", "line 2: ContextTokens is '-4'"),
        ("2023-11-16 18:17:03,4,0", "line 2: GeneratedTokens is 0"),
        ("2023-11-16 18:17:03,4," + "1" * 200_000, "line 2: field larger than field limit"),
        ("0001-01-01 00:00:00,-4,1", "line 2: ContextTokens is '-4'"),
    ],
)
def test_mistakes_in_csv_are_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(azure(tmp_path, row))


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.txt", "", "a trace is a"),
        ("a.jsonl", "", "no requests"),
        ("a.csv", "a,b\n", "no column TIMESTAMP"),
    ):
        file = tmp_path / name
        file.write_text(content)
        with pytest.raises(TraceError, match=message):
            read_trace(file)
    with pytest.raises(OSError):
        read_trace(tmp_path / "missing.csv")


@pytest.mark.parametrize("divisor", [0, -1, float("inf"), float("nan")])
def test_divisors_are_positive(divisor: float) -> None:
    with pytest.raises(ValueError, match="length_divisor"):
        scaled([], length_divisor=divisor)
