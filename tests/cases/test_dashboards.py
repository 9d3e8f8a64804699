"""Every query of every page, answered by a real Prometheus over series of every metric of the tables."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cluster.cli.metrics import through_ray
from cluster.launch.ports import free_port
from cluster.observe.answers import Range, ask, filled
from cluster.observe.local_prometheus import find_program, running
from cluster.observe.preview import preview
from cluster.observe.prometheus_api import ObserveError, PrometheusApi
from dashboards.pages import PAGES
from tests.unit.dashboards.openmetrics import NUM_STEPS, START, STEP_S, text
from tests.unit.dashboards.scraped import Scraped

PROMETHEUS, PROMTOOL = find_program("prometheus"), find_program("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="Prometheus is not here: apt install prometheus"
)
END = START + (NUM_STEPS - 1) * STEP_S
TIMES = Range(start=END - 120, end=END, step_s=60)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusApi]:
    """A Prometheus that holds ten minutes of everything."""
    folder = tmp_path_factory.mktemp("prometheus")
    source = folder / "series.om"
    source.write_text("\n".join(text()) + "\n", encoding="utf-8")
    subprocess.run(
        [str(PROMTOOL), "tsdb", "create-blocks-from", "openmetrics", str(source), str(folder / "data")],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert PROMETHEUS is not None
    with running(
        PROMETHEUS, lambda _: {"scrape_configs": []}, port=free_port(), data=folder / "data"
    ) as prometheus:
        yield PrometheusApi(prometheus.url)


def value(api: PrometheusApi, expr: str) -> dict[str, float]:
    """The last value of each line, by the values of its labels."""
    lines = api.query_range(filled(expr, rate_s=60), start=END, end=END, step_s=60)
    return {" ".join(line.labels.values()): line.values[-1][1] for line in lines}


def queries(page: str) -> dict[str, str]:
    """The first query of each panel by title."""
    return {panel.title: panel.queries[0].expr for panel in PAGES[page].panels}


@pytest.mark.parametrize("name", PAGES)
def test_no_panel_is_empty_and_no_value_is_missing(name: str, api: PrometheusApi) -> None:
    wrong = [
        f"{panel.title}: {answer.problem}: {answer.expr}"
        for panel in PAGES[name].panels
        for answer in ask(api, panel, TIMES)
        if answer.problem
    ]
    assert wrong == []


def test_values_are_right(api: PrometheusApi) -> None:
    fleet, kv = queries("fleet"), queries("kv-cache")
    assert value(api, fleet["Requests"]) == {"": pytest.approx(4.0)}  # two reasons, 2 a second each
    assert value(api, fleet["Failures"]) == {"": pytest.approx(0.5)}
    assert value(api, fleet["Goodput"]) == {"": pytest.approx(0.5)}
    assert value(api, fleet["Groups that answer"]) == {"": 6.0}  # two groups, as if 3 each
    assert value(api, kv["Blocks in use"]) == {"": pytest.approx(1 / 3)}
    assert value(api, kv["Blocks by state"]) == {"active": 6.0, "cached": 6.0, "free": 6.0}
    # 21 bounds and +Inf, a sample a second each: the median is the upper bound of the eleventh.
    assert value(api, fleet["Time to first token"]) == {"": pytest.approx(0.15)}


def test_the_preview_has_every_panel_and_needs_no_network(api: PrometheusApi) -> None:
    page, empty = preview(api, PAGES.values(), TIMES)
    assert empty == []
    assert all(panel.title in page for board in PAGES.values() for panel in board.panels)
    assert "@@" not in page
    for reference in ("src=", 'rel="stylesheet"', "@import", "fetch("):
        assert reference not in page


def test_what_is_no_query_is_refused_with_a_reason(api: PrometheusApi) -> None:
    with pytest.raises(ObserveError, match=r"refuses sum\(: .*parse error"):
        api.query_range("sum(", start=START, end=END, step_s=60)


def test_a_prometheus_that_is_not_there_is_named() -> None:
    with pytest.raises(ObserveError, match=r"no Prometheus answers at http:.*tandem metrics up"):
        PrometheusApi("http://127.0.0.1:1").query_range("up", start=START, end=END, step_s=60)


def test_series_of_rays_agents_get_our_names() -> None:
    """Found by Ray's service discovery, scraped, and renamed; Ray's own series keep their name."""
    exposition = 'ray_tandem_engine_up{group="g",model="m"} 1\nray_node_cpu_utilization 7\n'
    assert PROMETHEUS is not None
    with (
        Scraped(exposition, token="secret") as agent,
        running(
            PROMETHEUS, lambda folder: _quickly(through_ray(agent.url, "secret")(folder)), port=free_port()
        ) as prometheus,
    ):
        api = PrometheusApi(prometheus.url)
        assert agent.has_answered.wait(timeout=30)
        names = _names_after_scrape(api)
    assert names == {"tandem_engine_up", "ray_node_cpu_utilization"}


def _quickly(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "global": {"scrape_interval": "1s"}}


def _names_after_scrape(api: PrometheusApi) -> set[str]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        now = time.time()
        lines = api.query_range('{job="ray", __name__=~".*tandem.*|ray_.*"}', start=now, end=now, step_s=1)
        if lines:
            return {line.labels["__name__"] for line in lines}
        time.sleep(0.2)
    return set()


def test_a_prometheus_that_cannot_start_says_why() -> None:
    assert PROMETHEUS is not None
    with (
        pytest.raises(ObserveError, match=r"did not start \(exit 2\): .*not a valid duration"),
        running(PROMETHEUS, lambda _: {"global": {"scrape_interval": "soon"}}, port=free_port()),
    ):
        pass
