"""Pushing to a double of Grafana's HTTP API, of both kinds. No live Grafana was ever asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import pytest

from cluster.observe.grafana_api import GrafanaApi, Reply
from cluster.observe.prometheus_api import ObserveError, PrometheusApi
from cluster.observe.push import Pushed, push
from dashboards.pages import PAGES
from tests.unit.dashboards.grafana_double import READ_ONLY, TOKEN, GrafanaDouble
from tests.unit.dashboards.scraped import Scraped

PROMETHEUS = "http://prometheus:9090"
NUM_THINGS = len(PAGES) + 2
both = pytest.mark.parametrize("with_resources", [False, True], ids=["classic", "resources"])


def pushed(
    url: str, *, token: str = TOKEN, prometheus: str | None = PROMETHEUS, overwrite: bool = False
) -> list[str]:
    """What became of each thing."""
    done: list[Pushed] = []
    api = GrafanaApi(url, token, timeout_s=5.0)
    push(api, PAGES.values(), prometheus=prometheus, overwrite=overwrite, report=done.append)
    return [row.result for row in done]


@both
def test_everything_is_made_once(with_resources: bool) -> None:
    with GrafanaDouble(with_resources=with_resources) as grafana:
        assert pushed(grafana.url) == ["created"] * NUM_THINGS
        num_writes = len(grafana.writes)
        assert pushed(grafana.url) == ["unchanged"] * NUM_THINGS
    assert num_writes == len(grafana.writes) == NUM_THINGS
    assert grafana.folders["tandem"]["title"] == "Tandem"
    assert grafana.sources["tandem-prometheus"]["url"] == PROMETHEUS
    assert set(grafana.pages) == {page.uid for page in PAGES.values()}
    assert {page["folder"] for page in grafana.pages.values()} == {"tandem"}
    wanted = PAGES["fleet"].json()
    assert grafana.pages["tandem-fleet"]["spec"]["panels"] == wanted["panels"]
    used_resources = any(path.startswith("/apis/") for _, path in grafana.writes)
    assert used_resources == with_resources


@both
def test_what_differs_is_updated_in_place(with_resources: bool) -> None:
    with GrafanaDouble(with_resources=with_resources) as grafana:
        pushed(grafana.url)
        grafana.pages["tandem-group"]["spec"] = {"title": "mine"}
        grafana.pages["tandem-router"]["folder"] = "elsewhere"
        results = pushed(grafana.url, prometheus="http://other:9090")
    assert results == ["unchanged", "updated", "unchanged", "updated", "unchanged", "updated"]
    assert grafana.pages["tandem-group"]["spec"]["title"] == "Tandem / Worker groups"
    assert grafana.pages["tandem-router"]["folder"] == "tandem"
    assert [source["url"] for source in grafana.sources.values()] == ["http://other:9090"]


def test_data_sources_are_left_alone_without_a_prometheus() -> None:
    with GrafanaDouble() as grafana:
        assert pushed(grafana.url, prometheus=None) == ["created"] * (NUM_THINGS - 1)
    assert grafana.sources == {}


@both
def test_what_is_saved_meanwhile_is_not_written_over(with_resources: bool) -> None:
    with GrafanaDouble(with_resources=with_resources) as grafana:
        pushed(grafana.url)
        grafana.pages["tandem-fleet"]["spec"] = {"title": "mine"}
        grafana.edit_before_write = "tandem-fleet"
        with pytest.raises(ObserveError, match=r"'Tandem / Fleet'.*has been changed .*--overwrite"):
            pushed(grafana.url)
        assert grafana.pages["tandem-fleet"]["spec"] == {"title": "mine"}
        assert pushed(grafana.url, overwrite=True)[2] == "updated"
    assert grafana.pages["tandem-fleet"]["spec"]["title"] == "Tandem / Fleet"


def test_a_wrong_token_is_told() -> None:
    with GrafanaDouble() as grafana, pytest.raises(ObserveError, match="does not know this token"):
        pushed(grafana.url, token="glsa_wrong")
    assert grafana.writes == []


def test_a_token_that_may_only_read_is_told() -> None:
    with GrafanaDouble() as grafana, pytest.raises(ObserveError, match=r"does not let .*dashboards:write"):
        pushed(grafana.url, token=READ_ONLY)


def test_a_data_source_of_the_same_name_is_told() -> None:
    with GrafanaDouble() as grafana:
        grafana.sources["other"] = {"name": "Tandem Prometheus"}
        with pytest.raises(ObserveError, match=r"another data source called 'Tandem Prometheus'; rename"):
            pushed(grafana.url)


def test_an_unhealthy_grafana_is_told() -> None:
    with GrafanaDouble() as grafana:
        grafana.database = "failing"
        with pytest.raises(ObserveError, match="not healthy: its database is 'failing'"):
            pushed(grafana.url)


def test_nobody_there_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ObserveError, match=f"no Grafana answers at {url}"):
            pushed(url)


def test_what_is_no_grafana_is_told() -> None:
    with Scraped("up 1\n") as other, pytest.raises(ObserveError, match=f"at {other.url} is (no|not) "):
        pushed(other.url)


class Stranger(BaseHTTPRequestHandler):
    """Answers everything alike."""

    answer: tuple[int, str] = (200, "")

    def do_GET(self) -> None:
        status, text = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def stranger(status: int, text: str) -> Iterator[str]:
    handler = type("Handler", (Stranger,), {"answer": (status, text)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=5.0)


@pytest.mark.parametrize("text", ["", "[]", "5", "[1, 2]", "{}", "null", "<html>log in</html>"])
@pytest.mark.parametrize("status", [200, 404])
def test_what_is_no_grafana_is_called_so(status: int, text: str) -> None:
    with (
        stranger(status, text) as url,
        pytest.raises(ObserveError, match=f"^what answers at {url} is no Grafana$"),
    ):
        pushed(url)


@pytest.mark.parametrize(
    "text",
    [
        '{"status":"success","data":{"result":[{"metric":null,"values":[[1,"1"]]}]}}',
        '{"status":"success","data":{"result":[{"metric":{"le":[]},"values":[[1,"1"]]}]}}',
        '{"status":"success","data":{"result":[{"metric":{},"values":[[1e999,"1"]]}]}}',
        '{"status":"success","data":{"result":5}}',
    ],
)
def test_what_is_no_prometheus_is_called_so(text: str) -> None:
    with stranger(200, text) as url, pytest.raises(ObserveError, match=r"is no Prometheus$"):
        PrometheusApi(url).query_range("up", start=0, end=1, step_s=1)


def test_an_odd_page_in_grafana_is_written_over(caplog: pytest.LogCaptureFixture) -> None:
    with GrafanaDouble(with_resources=True) as grafana:
        pushed(grafana.url)
        api = GrafanaApi(grafana.url, TOKEN, timeout_s=5.0)
        get = api.get

        def odd(path: str) -> Reply:
            reply = get(path)
            if "/namespaces/" in path:
                return Reply(reply.status, {**reply.body, "metadata": {"annotations": None}})
            if path == "/apis/dashboard.grafana.app":
                return Reply(reply.status, {"versions": [{"version": []}, 5, {"version": "v1"}]})
            return reply

        with patch.object(api, "get", odd):
            done: list[Pushed] = []
            push(api, PAGES.values(), prometheus=None, overwrite=True, report=done.append)
        assert {row.result for row in done if row.kind == "page"} == {"updated"}
        with pytest.raises(ObserveError, match="does not know this token"):
            pushed(grafana.url, token="wrong")
    assert not caplog.records
