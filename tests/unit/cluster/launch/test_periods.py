"""Ray still reads the switches of `cluster.launch.periods` under their names, and deployment files agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.launch.periods import PERIODS

ROOT = Path(__file__).parents[4]
FILES = [*sorted((ROOT / "deploy").glob("*.yaml")), ROOT / "deploy" / "kuberay" / "rayservice.yaml"]
PROGRAM = """
import json
from ray.dashboard import consts
from ray.dashboard.modules.event import event_consts
from ray.dashboard.modules.reporter import reporter_consts
from ray.serve._private import constants
print(json.dumps([
    constants.CONTROL_LOOP_INTERVAL_S,
    constants.RAY_SERVE_METRICS_EXPORT_INTERVAL_MS,
    constants.PROXY_HEALTH_CHECK_PERIOD_S,
    reporter_consts.REPORTER_UPDATE_INTERVAL_MS,
    consts.METRICS_RECORD_INTERVAL_S,
    event_consts.SCAN_EVENT_DIR_INTERVAL_SECONDS,
]))
"""


def test_ray_takes_every_period() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    found = subprocess.run(command, env=os.environ | PERIODS, capture_output=True, check=True, timeout=60)
    assert json.loads(found.stdout) == [float(value) for value in PERIODS.values()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_deployment_files_say_what_a_local_cluster_does(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    tree = yaml.safe_load(tree["spec"]["serveConfigV2"]) if "spec" in tree else tree
    variables = tree["controller_options"]["runtime_env"]["env_vars"]
    of_serve = {name: value for name, value in PERIODS.items() if name.startswith("RAY_SERVE_")}
    assert {name: variables.get(name) for name in of_serve} == of_serve
