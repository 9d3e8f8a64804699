"""`tandem dashboards` and `tandem metrics`: what they write, say, and exit with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.commands import app
from cluster.cli.services import Services
from cluster.observe import local_prometheus
from cluster.observe.local_prometheus import need_prometheus
from cluster.observe.prometheus_api import ObserveError
from cluster.running.note import RunningNote
from dashboards.pages import PAGES, files
from tests.unit.dashboards.grafana_double import TOKEN, GrafanaDouble


def tandem(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and everything that is printed."""
    result = CliRunner().invoke(app, list(arguments), obj=Services(note=RunningNote(tmp_path / "note")))
    return result.exit_code, result.output


def test_build_writes_what_is_shipped_with_the_folder_as_path(tmp_path: Path) -> None:
    out = tmp_path / "grafana"
    code, said = tandem(tmp_path, "dashboards", "build", "-o", str(out))
    assert (code, said.splitlines()[0]) == (0, str(out / "tandem" / "fleet.json"))
    written = {str(file.relative_to(out)): file.read_text() for file in out.rglob("*") if file.is_file()}
    assert written == files(str(out / "tandem"))


def test_check_finds_nothing_wrong(tmp_path: Path) -> None:
    code, said = tandem(tmp_path, "dashboards", "check", "--json")
    found = json.loads(said)
    assert (code, found["problems"], found["pages"], found["queries_asked"]) == (0, [], list(PAGES), 0)


def test_check_and_preview_name_a_prometheus_that_is_not_there(tmp_path: Path) -> None:
    for command in (("check",), ("preview", "-o", str(tmp_path / "page.html"))):
        code, said = tandem(tmp_path, "dashboards", *command, "--prometheus", "http://127.0.0.1:1/")
        assert code == 1
        assert "no Prometheus answers at http://127.0.0.1:1 " in said
    assert not (tmp_path / "page.html").exists()


def test_push_says_what_became_of_each_thing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    with GrafanaDouble() as grafana:
        push = ("dashboards", "push", "--grafana", grafana.url + "/", "--token-file", str(token))
        code, said = tandem(tmp_path, *push)
    assert code == 0
    assert said.splitlines()[1:3] == ["created   folder Tandem", "created   page Tandem / Fleet"]


@pytest.mark.parametrize("content", [b"", b"two words\n", "schlüssel".encode(), b"\xff\xfe\x00"])
def test_a_file_without_a_token_is_refused(content: bytes, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    code, said = tandem(
        tmp_path, "dashboards", "push", "--grafana", "http://127.0.0.1:1", "--token-file", str(token)
    )
    assert code == 1
    assert "holds no token: one line of ASCII" in said


def test_a_file_of_a_token_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, said = tandem(
        tmp_path, "dashboards", "push", "--grafana", "http://127.0.0.1:1", "--token-file", "/nowhere/token"
    )
    assert (code, "/nowhere/token: No such file" in said) == (1, True)


def test_without_prometheus_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ObserveError, match=r"^Prometheus is not installed: apt install prometheus$"):
        need_prometheus(unpacked=tmp_path)
    assert local_prometheus.find_program("prometheus", unpacked=tmp_path) is None


def test_help_says_what_there_is(tmp_path: Path) -> None:
    code, said = tandem(tmp_path, "dashboards", "--help")
    assert code == 0
    for command in ("build", "check", "push", "preview"):
        assert command in said
    assert "up" in tandem(tmp_path, "metrics", "--help")[1]


@pytest.mark.parametrize(
    "arguments",
    [
        *(("dashboards", "check", "--prometheus", url) for url in ("notaurl", "http://", "http://a:x", "")),
        ("dashboards", "preview", "--prometheus", "ftp://a"),
        ("dashboards", "preview", "--minutes", "1e308"),
        ("dashboards", "build", "-o", ""),
        ("plan", "llama-2-7b", "-o", ""),
        ("dashboards", "push", "--grafana", "grafana:3000", "--token-file", "token"),
        *(
            ("metrics", "up", "--target", text)
            for text in ("", "nohost", "a b:99999", "a:99999", "http://a:1")
        ),
    ],
)
def test_values_that_are_none_are_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, said = tandem(tmp_path, *arguments)
    assert code == 2 and f"Invalid value for '{arguments[2]}'" in said


def test_a_page_that_cannot_be_written_is_told_before_anybody_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = ("-o", str(tmp_path / "file" / "page.html"))
    code, said = tandem(tmp_path, "dashboards", "preview", *place, "--prometheus", "http://127.0.0.1:1")
    assert code == 1 and "its folder cannot be made" in said and "Prometheus" not in said


def test_passwords_of_addresses_are_not_printed(tmp_path: Path) -> None:
    code, said = tandem(tmp_path, "dashboards", "check", "--prometheus", "http://me:secret@127.0.0.1:1")
    assert code == 1 and "secret" not in said and "http://127.0.0.1:1 " in said
