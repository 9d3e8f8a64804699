"""`tandem deploy` from one unified pool to a prefill and a decode pool, while clients stream and ask anew:
router and groups are replaced, and every answer is what it would have been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import config_of, serving, tiny_llama, wait_for
from tests.integration.streams import answer_of, streaming
from tests.models import checkpoints

pytestmark = pytest.mark.integration

DEPLOY_S = 200.0  # patience on a busy machine
COMMON: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = COMMON | {"prompt": checkpoints.prompt_ids(200), "max_tokens": 8}
# Less than a block: there is nothing to read.
SHORT = [COMMON | {"prompt": checkpoints.prompt_ids(10, seed=seed), "max_tokens": 300} for seed in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), 1024)


def settings_of(folder: Path, *pools: str) -> list[str]:
    settings = [f"model.path={folder}", "model.dtype=float32"]
    for pool in pools:
        settings += [f"pools.{pool}.cache.num_blocks=128", f"pools.{pool}.parallel.threads_per_rank=1"]
        settings += [f"pools.{pool}.cpus_per_rank=0.5", f"pools.{pool}.drain_timeout_s=0.5"]
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


def test_from_one_pool_to_two(
    cluster: LocalCluster, http_port: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two-pools.json"
    pools = settings_of(folder, "prefill", "decode")
    file.write_text(json.dumps(config_of("local-disaggregated.yaml", http_port, pools)))
    with serving(cluster, http_port, "local.yaml", settings_of(folder, "unified")) as server:
        expected = answer_of(server, LONG)
        alone = [answer_of(server, body) for body in SHORT]
        with streaming(server, SHORT, alone) as seen:
            wait_for(lambda: seen.num_tokens > 100, 30.0, "nothing streams")
            said = tandem(tmp_path, "deploy", str(file), "--dashboard", cluster.api.url)
            assert said["event"] == "ready"

            def roles() -> list[tuple[str, bool]]:
                return sorted((group["role"], group["ready"]) for group in server.groups())

            wait_for(lambda: roles() == [("decode", True), ("prefill", True)], 60.0, "the old pool stays")
        with capsys.disabled():
            print(
                f"\n{seen.num_right} streams right, {len(seen.wrong)} not; longest gap {seen.longest_s:.1f} s"
            )
        assert seen.wrong == []
        assert answer_of(server, LONG) == expected
        (application,) = tandem(
            tmp_path, "status", "--dashboard", cluster.api.url, "--gcs-address", cluster.gcs_address
        )["applications"]
        (pair,) = application["pairs"]
        assert pair["transport"] == "memory" and pair["num_done"] > pair["num_failed"] == 0
        assert {row["role"]: row["leases"] for row in application["rows"]} == {
            "router": None,
            "prefill": 0,
            "decode": 0,
        }
