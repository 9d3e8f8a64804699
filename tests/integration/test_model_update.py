"""An update to another model: no answer mixes two models, and one that fails leaves the old model serving."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.launch.errors import LaunchError
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import APPLICATION, Serving, config_of, serving
from tests.models import checkpoints
from tests.models.toy_tokenizers import ascii_tokenizer, byte_tokenizer

pytestmark = pytest.mark.integration

PROMPT = "The capital of France is"


def build(folder: Path, *, vocab_size: int, is_ascii: bool = False) -> Path:
    folder.mkdir()
    (ascii_tokenizer(adds_bos=False) if is_ascii else byte_tokenizer()).save_pretrained(folder)
    return checkpoints.build(folder, checkpoints.family("llama"), vocab_size=vocab_size)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models whose tokenizers differ, and one whose weights are no numbers."""
    root = tmp_path_factory.mktemp("models")
    folders = {
        "first": build(root / "first", vocab_size=300),
        "second": build(root / "second", vocab_size=128, is_ascii=True),
        "broken": build(root / "broken", vocab_size=300),
    }
    file = folders["broken"] / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, file, metadata={"format": "pt"})
    return folders


@dataclass
class Answers:
    """What a client that never stops asking got: (status, model, text), and how often."""

    seen: Counter[tuple[int, str, str]] = field(default_factory=Counter)

    def ask(self, url: str) -> None:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0, trust_env=False)
        except httpx.HTTPError:
            self.seen[0, "", ""] += 1
            return
        content = answer.json()
        text = content["choices"][0]["text"] if answer.status_code == 200 else content["error"]["code"]
        self.seen[answer.status_code, content.get("model", ""), text] += 1


@contextmanager
def asking(url: str) -> Iterator[Answers]:
    answers, ended = Answers(), threading.Event()

    def ask() -> None:
        while not ended.wait(0.05):
            answers.ask(url)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join(timeout=60)


def settings_of(name: str, folders: dict[str, Path]) -> list[str]:
    return [f"model.path={folders[name]}", "model.dtype=float32", f"model.name={name}"]


def update(server: Serving, port: int, settings: list[str]) -> None:
    deploy(server.cluster.api, config_of("local.yaml", port, settings))
    wait_ready(server.cluster.api, application=APPLICATION, url=server.url, timeout_s=120.0)


def test_no_answer_mixes_models_and_a_failed_update_leaves_the_old_one(
    cluster: LocalCluster, http_port: int, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(cluster, http_port, "local.yaml", settings_of("first", folders)) as server:
        alone = Answers()
        alone.ask(server.url)
        with asking(server.url) as during:
            update(server, http_port, settings_of("second", folders))
            deadline = time.monotonic() + 60
            while server.model != "second" and time.monotonic() < deadline:
                time.sleep(0.2)
        after = Answers()
        after.ask(server.url)
        right = {*alone.seen, *after.seen}
        assert {(status, model) for status, model, _ in right} == {(200, "first"), (200, "second")}
        with capsys.disabled():
            print(f"\nduring the update: {dict(during.seen)}")
        assert {seen for seen in during.seen if seen[0] != 503} == right
        with asking(server.url) as during:
            with pytest.raises(LaunchError, match="deployment failed"):
                update(server, http_port, settings_of("broken", folders))
            time.sleep(2.0)
        with capsys.disabled():
            print(f"during the failed one: {dict(during.seen)}")
        assert set(during.seen) == set(after.seen)
