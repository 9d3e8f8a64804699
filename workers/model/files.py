"""The files of a model folder: which ones count, and that they stay inside it."""

from __future__ import annotations

import json
from pathlib import Path

from workers.model.errors import CheckpointError
from workers.model.safetensors_header import SafetensorsHeader, read_header
from workers.regular_file import read_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_JSON_BYTES = 64 << 20  # the index of a very large model has a few MB


def read_json(folder: Path, name: str) -> dict[str, object]:
    """A JSON object of the folder. Raises CheckpointError when it is absent, unreadable, huge or broken."""
    file = resolve_inside(folder, name)
    try:
        parsed = json.loads(read_regular(file, max_bytes=_MAX_JSON_BYTES))
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / name}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{folder / name}: not a JSON object")
    return parsed


def resolve_inside(folder: Path, name: str) -> Path:
    """The real path of a file of the folder.

    Links may lead anywhere inside the folder, or to the blob store of the hub cache the folder belongs to
    (`models--*/snapshots/<revision>/file -> ../../blobs/<digest>`). Raises CheckpointError for any other.
    """
    if name != Path(name).name or name in ("", ".", ".."):
        raise CheckpointError(f"{folder}: file name {name[:200]!r} leads outside the folder")
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; a name that no file can have
        raise CheckpointError(f"{folder}: file {name[:200]!r} cannot be found: {error}") from error
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise CheckpointError(f"{folder / name}: links to {real}, outside the folder")
    return real


def read_weight_headers(folder: Path) -> list[SafetensorsHeader]:
    """Headers of the safetensors files that make up the model: the single file, or those of the index.

    Files that the index does not name are left alone. Raises CheckpointError for a folder with pickle weights
    only or without weights, and for an index that is broken, names files that are absent or outside, or
    disagrees with the files about where a tensor lies.
    """
    if (folder / SINGLE_FILE).exists():
        return [read_header(resolve_inside(folder, SINGLE_FILE))]
    if (folder / INDEX_FILE).exists():
        return _indexed_headers(folder)
    pickles = sorted(file.name for file in folder.iterdir() if file.name.endswith(_PICKLE_ENDINGS))
    if pickles:
        raise CheckpointError(
            f"{folder}: pickle checkpoints are not loaded; convert offline to safetensors "
            f"(found {pickles[0]})"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _indexed_headers(folder: Path) -> list[SafetensorsHeader]:
    weight_map = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE}: weight_map is not an object with entries")
    where: dict[str, str] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX_FILE}: {tensor[:200]!r} is not in a safetensors file")
        where[tensor] = name
    files = {name: resolve_inside(folder, name) for name in sorted(set(where.values()))}
    absent = [name[:200] for name, file in files.items() if not _is_there(file)]
    if absent:
        raise CheckpointError(f"{folder}: {INDEX_FILE} names files that are not there: {', '.join(absent)}")
    headers = {name: read_header(file) for name, file in files.items()}
    problems = [
        f"{tensor} is not in {name}" for tensor, name in where.items() if tensor not in headers[name].tensors
    ]
    if problems:
        raise CheckpointError(f"{folder}: {INDEX_FILE} disagrees with the files:\n  " + "\n  ".join(problems))
    return list(headers.values())


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # as for a name that is too long
        return False
