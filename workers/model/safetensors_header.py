"""The header of a safetensors file, read as hostile input before anything is allocated for its tensors.

Format: 8 bytes little-endian length, that many bytes of JSON {name: {dtype, shape, data_offsets}}, then the
data. Offsets count from the end of the header; tensors must cover the data without gap or overlap.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from workers.model.errors import CheckpointError
from workers.regular_file import open_regular

_MAX_HEADER_BYTES = 100 << 20
_MAX_SIZE = 1 << 48

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """What a file holds."""

    file: Path
    digest_input: bytes  # the JSON as it stands in the file
    file_bytes: int
    tensors: dict[str, TensorEntry]


def read_header(file: Path) -> SafetensorsHeader:
    """Reads and checks the header of a file. Raises CheckpointError naming file, tensor and numbers."""
    try:
        with open_regular(file) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or length > file_bytes - 8:
                raise CheckpointError(
                    f"{file}: the header claims {length} bytes, the file has {file_bytes}: truncated or "
                    "not a safetensors file"
                )
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file}: the header claims {length} bytes, over {_MAX_HEADER_BYTES}")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    entries = _parse(file, raw)
    tensors = {}
    for name, value in entries.items():
        if name != "__metadata__":
            tensors[name] = _entry(file, name, value, data_start=8 + length)
    _check_cover(file, list(tensors.values()), data_start=8 + length, file_bytes=file_bytes)
    return SafetensorsHeader(file=file, digest_input=raw, file_bytes=file_bytes, tensors=tensors)


def _parse(file: Path, raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointError(f"{file}: the header names {name[:200]!r} twice")
            found[name] = value
        return found

    try:
        parsed = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    return parsed


def _entry(file: Path, name: str, value: object, data_start: int) -> TensorEntry:
    where = f"{file}: tensor {name[:200]!r}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: its entry is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{where}: shape {str(shape)[:80]} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(at) for at in offsets):
        raise CheckpointError(f"{where}: data_offsets {str(offsets)[:80]} are not two sizes")
    start, stop = offsets
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_SIZE:
            raise CheckpointError(f"{where}: shape {str(shape)[:80]} is beyond any file")
    if stop - start != count * DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{where}: {dtype} of shape {str(shape)[:80]} takes {count * DTYPE_BYTES[dtype]} bytes, "
            f"its offsets {start} to {stop} hold {stop - start}"
        )
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), start=data_start + start, stop=data_start + stop
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def _check_cover(file: Path, tensors: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    """Tensors laid end to end, from the end of the header to the end of the file."""
    at = data_start
    for entry in sorted(tensors, key=lambda entry: (entry.start, entry.stop)):
        if entry.stop > file_bytes:
            raise CheckpointError(
                f"{file}: tensor {entry.name[:200]!r} ends at byte {entry.stop}, the file at {file_bytes}: "
                "truncated"
            )
        if entry.start != at:
            kind = "overlaps the one before it" if entry.start < at else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: tensor {entry.name[:200]!r} {kind}: starts at byte {entry.start}, expected {at}"
            )
        at = entry.stop
    if at != file_bytes:
        raise CheckpointError(f"{file}: {file_bytes - at} bytes after the last tensor belong to none")
