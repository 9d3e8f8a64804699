"""Alert rules and scrape configs, as Prometheus' own tool sees them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.observe.local_prometheus import find_program
from cluster.observe.promtool import check_rules
from dashboards.alerts import ALERTS

HERE = Path(__file__).parent
SHIPPED = HERE.parents[2] / "dashboards" / "files"
PROMTOOL = find_program("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: apt install prometheus")


def promtool(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [str(PROMTOOL), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_rules() -> None:
    assert PROMTOOL is not None
    assert check_rules(PROMTOOL) == []
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", "alerts.yml", cwd=SHIPPED)


def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    shutil.copy(SHIPPED / "alerts.yml", tmp_path)
    cases = HERE / "alerts_test.yml"
    shutil.copy(cases, tmp_path)
    assert {alert.name for alert in ALERTS if alert.name not in cases.read_text()} == set()
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)


@pytest.mark.parametrize("name", ["prometheus-ray.yml", "prometheus-plain.yml"])
def test_the_scrape_configs_are_valid(name: str) -> None:
    assert "is valid prometheus config file syntax" in promtool("check", "config", name, cwd=SHIPPED)
