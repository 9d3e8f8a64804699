"""The list of a folder's files with their sizes and sha256, kept inside it: tells damage from intact.

It guards against half-written files, bad disks and stray edits, not against someone who can rewrite the
manifest too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from workers.regular_file import open_regular, read_regular

MANIFEST = "manifest.json"
FORMAT = 1
_MAX_BYTES = 1 << 20


def sha256_file(file: Path) -> str:
    """Hex sha256 of a file's content. Raises OSError."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path, made_from: str) -> None:
    """Record every file of the folder. `made_from` says what produced them; another value means outdated."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST
    }
    text = json.dumps({"format": FORMAT, "made_from": made_from, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def find_damage(folder: Path, made_from: str) -> list[str]:
    """What differs from the manifest, one sentence a file; empty when the folder is as it was written.

    Reads every byte. Never raises for what the folder holds; an unreadable file is damage.
    """
    listed = _read(folder / MANIFEST)
    if listed is None:
        return [f"{MANIFEST} is missing or not readable"]
    if listed["format"] != FORMAT or listed["made_from"] != made_from:
        return [f"{MANIFEST} is of another version: {listed['made_from']}, wanted {made_from}"]
    damage = []
    files: dict[str, Any] = listed["files"]
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                damage.append(f"{name} has {size} bytes, {entry['bytes']} were written")
            elif (found := sha256_file(folder / name)) != entry["sha256"]:
                damage.append(f"{name} has sha256 {found}, {entry['sha256']} was written")
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror}")
    try:
        present = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    except OSError as error:  # swapped for a new one at this moment, or not ours to read
        return [*damage, f"the folder cannot be read: {error.strerror}"]
    damage += [f"{name} does not belong here" for name in sorted(present - set(files) - {MANIFEST})]
    return damage


def _read(file: Path) -> dict[str, Any] | None:
    """The manifest if it has the right shape."""
    try:
        listed: Any = json.loads(read_regular(file, max_bytes=_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(listed, dict) or not {"format", "made_from", "files"} <= set(listed):
        return None
    files = listed["files"]
    if not isinstance(files, dict):
        return None
    for name, entry in files.items():
        if Path(name).name != name or not isinstance(entry, dict) or not {"bytes", "sha256"} <= set(entry):
            return None
    return listed
