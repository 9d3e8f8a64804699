"""Pages and rules: what is shipped is what is built, and asks only for what the tables have."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.observe.checks import known_series, problems, query_problems
from dashboards import promql
from dashboards.grafana import TAG, Dashboard, Panel, Query, Row
from dashboards.pages import PAGES, SHIPPED_PATH, files
from router.telemetry import table
from workers.metrics import group

FOLDER = Path(__file__).parents[3] / "dashboards" / "files"


def test_the_files_are_what_the_source_builds() -> None:
    shipped = {
        str(file.relative_to(FOLDER)): file.read_text(encoding="utf-8")
        for file in FOLDER.rglob("*")
        if file.is_file()
    }
    command = f"tandem dashboards build -o dashboards/files --grafana-path {SHIPPED_PATH}"
    assert shipped == files(), f"run `{command}`"


def test_nothing_is_wrong_with_pages_and_rules() -> None:
    assert problems() == []


def test_every_metric_of_the_tables_is_on_a_page() -> None:
    """But for what only describes a group: its size and numbers."""
    panels = [panel for page in PAGES.values() for panel in page.panels]
    asked = " ".join(query.expr for panel in panels for query in panel.queries)
    specs = (*table.ROUTER_METRICS, *group.GROUP_METRICS)
    unseen = {spec.name for spec in specs if spec.shown_name not in asked}
    assert unseen == {"engine_info", "request_output_tokens"}


@pytest.mark.parametrize(
    ("expr", "legend", "problem"),
    [
        ("sum(tandem_nothing)", "", "no metric tandem_nothing"),
        ('sum(tandem_engine_up{color="red"})', "", "tandem_engine_up has no label color"),
        ("sum by (color) (tandem_engine_up)", "", "no label color"),
        ("sum by (group) (tandem_engine_up)", "{{role}}", "its lines have no label role for their name"),
        ("rate(tandem_engine_up[1m])", "", "rate of tandem_engine_up, which is no counter"),
        (
            "histogram_quantile(0.5, sum by (model) (rate(tandem_ttft_seconds_bucket[1m])))",
            "",
            "the buckets of a quantile lose le",
        ),
        ('sum(tandem_engine_up{model="$cluster"})', "", "no such variable: $cluster"),
    ],
)
def test_a_wrong_query_is_found(expr: str, legend: str, problem: str) -> None:
    assert list(query_problems(expr, legend)) == [f"{expr}: {problem}"]


def test_a_query_that_is_no_promql_is_found() -> None:
    (problem,) = query_problems("sum(tandem_engine_up")
    assert problem.startswith("sum(tandem_engine_up: ")


def test_queries_are_built_from_the_tables() -> None:
    assert promql.total_rate(table.REQUESTS, "reason") == (
        'sum by (reason) (rate(tandem_requests_total{model=~"$model"}[$__rate_interval]))'
    )
    assert promql.quantile(0.95, group.STEP_SECONDS, "kind") == (
        "histogram_quantile(0.95, sum by (le, kind) (rate(tandem_engine_step_seconds_bucket"
        '{model=~"$model", group=~"$group"}[$__rate_interval])))'
    )
    with pytest.raises(AssertionError, match="engine_up"):
        promql.rate(group.UP)
    with pytest.raises(AssertionError, match="requests"):
        promql.level(table.REQUESTS)


def test_histograms_have_their_three_series() -> None:
    known = known_series()
    assert known["tandem_stage_seconds_bucket"] == {"model", "replica", "stage", "le"}
    assert known["tandem_stage_seconds_sum"] == known["tandem_stage_seconds_count"]
    assert "tandem_stage_seconds" not in known


def test_a_page_in_grafanas_json() -> None:
    panel = Panel(title="Up", description="?", unit="short", queries=(Query("tandem_engine_up"),), width=16)
    page = Dashboard(
        uid="p", title="P", description="", models="a", groups="b", rows=(Row("R", 4, (panel, panel)),)
    )
    board = page.json()
    assert board["tags"] == [TAG]
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "model", "group"]
    query = board["templating"]["list"][2]["query"]
    assert query == {"query": 'label_values(b{model=~"$model"}, group)', "refId": "Group"}
    assert [row["gridPos"] for row in board["panels"]] == [
        {"x": 0, "y": 0, "w": 24, "h": 1},
        {"x": 0, "y": 1, "w": 16, "h": 4},
        {"x": 0, "y": 5, "w": 16, "h": 4},
    ]
    assert board["panels"][1]["targets"][0]["refId"] == "A"


def test_provisioning_stands_beside_rays() -> None:
    built = files("/ray/tandem")
    pages = yaml.safe_load(built["provisioning/dashboards/tandem.yml"])
    sources = yaml.safe_load(built["provisioning/datasources/tandem.yml"])
    assert pages["providers"][0]["options"] == {"path": "/ray/tandem"}
    assert pages["providers"][0]["folderUid"] == "tandem"
    assert [source["isDefault"] for source in sources["datasources"]] == [False]  # Ray's is
