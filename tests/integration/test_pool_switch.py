"""`tandem deploy` from one unified pool to a prefill and a decode pool, while clients go on asking."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import Serving, config_of, serving, tiny_llama, wait_for
from tests.models import checkpoints

pytestmark = pytest.mark.integration

DEPLOY_S = 120.0
BODY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = checkpoints.prompt_ids(200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), 1024)


def settings_of(folder: Path, *pools: str) -> list[str]:
    settings = [f"model.path={folder}", "model.dtype=float32"]
    for pool in pools:
        settings += [f"pools.{pool}.cache.num_blocks=128", f"pools.{pool}.parallel.threads_per_rank=1"]
        settings += [f"pools.{pool}.cpus_per_rank=0.5", f"pools.{pool}.drain_timeout_s=5"]
    if "prefill" in pools:  # every block that the decode group lacks is worth reading
        settings += ["router.placement.interference_weight=1000", "router.placement.transfer_ms=0"]
    return settings


def tandem(home: Path, *arguments: str) -> dict[str, Any]:
    """Runs the command with `--json`; what it said last."""
    done = subprocess.run(
        [sys.executable, "-c", "from cluster.cli import main; main()", *arguments, "--json"],
        env=os.environ | {"HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEPLOY_S,
    )
    assert done.returncode == 0, done.stdout
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@contextmanager
def asking(url: str, body: dict[str, Any]) -> Iterator[Counter[str]]:
    """A client that never stops; what it got, and how often: the tokens, or the error's code."""
    seen: Counter[str] = Counter()
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.05):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0, trust_env=False).json()
            said = answer["choices"][0]["token_ids"] if "choices" in answer else answer["error"]["code"]
            seen[str(said)] += 1

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join(timeout=60)


def tokens(server: Serving, prompt: list[int]) -> list[int]:
    answer = server.post("/v1/completions", BODY | {"prompt": prompt})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_from_one_pool_to_two(
    cluster: LocalCluster, http_port: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two-pools.json"
    pools = settings_of(folder, "prefill", "decode")
    file.write_text(json.dumps(config_of("local-disaggregated.yaml", http_port, pools)))
    with serving(cluster, http_port, "local.yaml", settings_of(folder, "unified")) as server:
        expected = tokens(server, PROMPT)
        body = BODY | {"prompt": checkpoints.prompt_ids(10)}  # less than a block: nothing to read
        alone = str(tokens(server, body["prompt"]))
        with asking(server.url, body) as during:
            said = tandem(tmp_path, "deploy", str(file), "--dashboard", cluster.api.url)
            assert said["event"] == "ready"

            def roles() -> list[tuple[str, bool]]:
                return sorted((group["role"], group["ready"]) for group in server.groups())

            wait_for(lambda: roles() == [("decode", True), ("prefill", True)], 60.0, "the old pool stays")
        with capsys.disabled():
            print(f"\nduring the switch: {dict(during)}")
        # They wait for the new pool; refused only where its groups take longer than that to be started.
        assert during.keys() <= {alone, "no_ready_group"} and during[alone] > during["no_ready_group"]
        assert tokens(server, PROMPT) == expected
        (application,) = tandem(
            tmp_path, "status", "--dashboard", cluster.api.url, "--gcs-address", cluster.gcs_address
        )["applications"]
        (pair,) = application["pairs"]
        assert (pair["transport"], pair["num_done"], pair["num_failed"]) == ("memory", 1, 0)
        assert {row["role"]: row["leases"] for row in application["rows"]} == {
            "router": None,
            "prefill": 0,
            "decode": 0,
        }
