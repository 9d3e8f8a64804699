"""The shipped dashboards: built from their source, and asking only for what a served run really tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.__main__ import FILES, text_of
from dashboards.grafana import DATASOURCE
from router.dispatch.interface import PairState
from tests.cases.serving import COMPLETIONS, serving
from tests.models.checkpoints import successor
from tests.models.toy_tokenizers import byte_tokenizer
from tests.unit.router.client import call
from workers.types import GroupId

FOLDER = Path(__file__).parents[2] / "dashboards"
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}


def panels() -> Iterator[dict[str, Any]]:
    for name in FILES:
        yield from (
            panel for panel in json.loads((FOLDER / name).read_text())["panels"] if panel["type"] != "row"
        )


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def plain(query: str) -> str:
    """The query with Grafana's variables filled in."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    return query


def expressions(query: str) -> list[Any]:
    """All parts of a query, parsed; raises ValueError for what is no PromQL."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(plain(query)), lambda part: found.append(part))
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Labels of every series of a run with an answer and a refusal, by name."""
    tokenizer = byte_tokenizer()
    folder = successor(
        tmp_path_factory.mktemp("model"),
        list(range(len(tokenizer))),
        tokenizer=tokenizer,
        max_position_embeddings=64,
    )
    with serving(folder) as running:
        assert running.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 3}).status_code == 200
        assert running.post(COMPLETIONS, {"prompt": "ab", "n": 0}).status_code == 400
        running.dispatcher.known_pairs = (PairState(GroupId("p"), GroupId("d"), 1, 0, 1e9, 4096),)
        text = call(running.stack.app, "/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_what_the_source_builds(name: str) -> None:
    built = text_of(FILES[name])
    assert (FOLDER / name).read_text(encoding="utf-8") == built, "run `python -m dashboards`"


def test_grafana_finds_what_it_needs() -> None:
    for name in FILES:
        board = json.loads((FOLDER / name).read_text())
        assert board["schemaVersion"] == 39
        assert 0 < len(board["uid"]) <= 40
        variables = {variable["name"]: variable for variable in board["templating"]["list"]}
        assert variables["datasource"]["type"] == "datasource"
        assert variables["datasource"]["query"] == "prometheus"
        assert variables["model"]["datasource"] == DATASOURCE
        ids = [panel["id"] for panel in board["panels"]]
        assert ids == list(range(1, len(ids) + 1))
        taken = [
            (place["x"] + x, place["y"] + y)
            for place in (panel["gridPos"] for panel in board["panels"])
            for x in range(place["w"])
            for y in range(place["h"])
        ]
        assert len(taken) == len(set(taken)), "panels overlap"
        assert max(x for x, _ in taken) == 23
    for panel in panels():
        assert panel["datasource"] == DATASOURCE
        assert [target["refId"] for target in panel["targets"]] == list("ABCD")[: len(panel["targets"])]
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"])


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_series_and_labels_that_there_are(query: str, served: dict[str, set[str]]) -> None:
    parts = expressions(query)
    selectors = [part for part in parts if isinstance(part, promql_parser.VectorSelector)]
    selectors += [part.vector_selector for part in parts if isinstance(part, promql_parser.MatrixSelector)]
    assert selectors
    known: set[str] = set()
    for selector in selectors:
        assert selector.name in served
        known |= served[selector.name]
        assert [matcher.name for matcher in selector.matchers.matchers] == ["model"]
    for part in parts:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            assert part.modifier.type == promql_parser.AggModifierType.By
            assert set(part.modifier.labels) <= known
        if isinstance(part, promql_parser.Call) and part.func.name == "histogram_quantile":
            (buckets,) = part.args[1:]
            assert "le" in buckets.modifier.labels


def test_rates_are_of_counters_and_levels_are_not() -> None:
    for query in queries():
        parts = expressions(query)
        of_rates = [
            part.args[0]
            for part in parts
            if isinstance(part, promql_parser.Call) and part.func.name == "rate"
        ]
        for selector in of_rates:
            assert selector.vector_selector.name.endswith(("_total", "_bucket"))
        for part in parts:
            if isinstance(part, promql_parser.VectorSelector) and not of_rates:
                assert not part.name.endswith(("_total", "_bucket", "_count", "_sum"))
