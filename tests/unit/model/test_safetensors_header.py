"""Damaged and hostile safetensors headers: refused with file, tensor and numbers, before any allocation."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from workers.model.errors import CheckpointError
from workers.model.safetensors_header import read_header

GOOD = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(folder: Path, header: object, data: bytes = bytes(24), *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return file


def test_a_good_file(tmp_path: Path) -> None:
    file = write(tmp_path, {**GOOD, "__metadata__": {"format": "pt"}})
    entry = read_header(file).tensors["a"]
    assert (entry.dtype, entry.shape, entry.stop - entry.start) == ("F32", (2, 3), 24)
    assert entry.stop == file.stat().st_size


@pytest.mark.parametrize("length", [10**9, (1 << 64) - 1, 10_000])
def test_length_beyond_the_file(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"the header claims {length} bytes, the file has"):
        read_header(write(tmp_path, GOOD, length=length))


def test_length_over_the_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:  # sparse
        stream.write((200 << 20).to_bytes(8, "little"))
        stream.truncate(300 << 20)
    with pytest.raises(CheckpointError, match="the header claims 209715200 bytes, over 104857600"):
        read_header(file)


def test_empty_and_absent_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(file)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="the file has 0"):
        read_header(file)


def test_a_double_name_among_very_many_is_found_at_once(tmp_path: Path) -> None:
    names = ",".join(f'"{number}":0' for number in range(200_000))
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="names '199999' twice"):
        read_header(write(tmp_path, f'{{{names},"199999":0}}'.encode()))
    assert time.monotonic() - started < 20  # every name against every other takes minutes


def entry(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        ([], "not a JSON object"),
        (b'{"a": 1, "a": 2}', "names 'a' twice"),
        ({"a": 3}, "its entry is not an object"),
        (entry(dtype="F33"), "unknown dtype 'F33'"),
        (entry(dtype=[]), "unknown dtype"),
        (entry(shape=[-1, 3]), "is not a list of sizes"),
        (entry(shape=[2.0, 3]), "is not a list of sizes"),
        (entry(shape=[1 << 40, 1 << 40]), "is beyond any file"),
        (entry(shape=[1 << 70]), "is not a list of sizes"),
        (entry(offsets=[0]), "are not two sizes"),
        (entry(offsets=[0, 1 << 70]), "are not two sizes"),
        (entry(offsets=[24, 0]), "takes 24 bytes, its offsets 24 to 0 hold -24"),
        (entry(offsets=[0, 20]), "takes 24 bytes, its offsets 0 to 20 hold 20"),
        (entry(shape=[2, 4], offsets=[0, 32]), "truncated"),
        (entry(shape=[2], offsets=[16, 24]), "leaves a gap before it"),
        (entry(shape=[2], offsets=[0, 8]), "16 bytes after the last tensor belong to none"),
        (
            {
                **entry(shape=[4], offsets=[0, 16]),
                "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
            },
            "'b' overlaps the one before it",
        ),
    ],
)
def test_refusals(header: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(write(tmp_path, header))
    assert message in str(caught.value)
