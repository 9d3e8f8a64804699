"""What the documents name is there: files, links, commands with their options, config paths, make targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from cluster.cli.commands import app
from cluster.config.parse import apply_overrides, check_config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
TESTS = tuple(ROOT / "tests" / folder for folder in ("", "unit", "unit/router"))  # named without their folder
PACKAGES = ("workers", "router", "cluster", "dashboards", "benchmarks", "tests")
FOLDERS = (*PACKAGES, "deploy", "docs", "requirements")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"(?<![\w/.~-])(?:{'|'.join(FOLDERS)})/[\w./*-]*")
_TEST = re.compile(r"`([\w/]+\.py)::([tT]est\w+)(?:\[[^`]*\])?`")  # in brackets: which of its cases
_ENDS = ("|", "&&", ";", "#", ">", "&")
_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def snippets(text: str) -> Iterator[str]:
    """Code in a document: lines of blocks, those that go on joined, and code within sentences."""
    for block in _FENCE.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    # Code in a sentence may go on in the next line.
    yield from (" ".join(code.split()) for code in _CODE.findall(_FENCE.sub("", text).replace("\n", " ")))


def words_of(snippet: str) -> list[str]:
    try:
        return shlex.split(snippet, comments=True)
    except ValueError:  # no shell: JSON, a formula
        return snippet.split()


def commands(words: Sequence[str], program: str) -> Iterator[list[str]]:
    """The arguments of each call of a program, also within the quotes of another command."""
    for place, word in enumerate(words):
        if " " in word:
            yield from commands(words_of(word), program)
        elif word == program or word.endswith(f"/{program}"):
            rest = words[place + 1 :]
            ends = [end for end, other in enumerate(rest) if other in _ENDS]
            yield list(rest[: ends[0] if ends else None])


def resolve(arguments: list[str]) -> tuple[TyperCommand | TyperGroup, list[str]]:
    """The command that arguments of `tandem` begin with, and the rest. Fails for one that is not there."""
    found = get_command(app)
    assert isinstance(found, TyperGroup)
    while isinstance(found, TyperGroup) and arguments:
        named = arguments[0].rstrip(",.:)")
        if not named.islower():  # `tandem COMMAND`
            break
        assert named in found.commands, f"no command {' '.join(arguments)}"
        inner = found.commands[named]
        assert isinstance(inner, TyperCommand | TyperGroup)
        found, arguments = inner, arguments[1:]
    return found, arguments


@pytest.fixture(params=DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    file: Path = request.param
    return file


def test_links_lead_somewhere(document: Path) -> None:
    missing = [
        target
        for target in _LINK.findall(document.read_text())
        if not target.startswith(("http://", "https://"))
        and not (document.parent / target.partition("#")[0]).exists()
    ]
    assert missing == []


def test_files_that_are_named_are_there(document: Path) -> None:
    named = {found.rstrip(".") for code in snippets(document.read_text()) for found in _PATH.findall(code)}
    places = (ROOT, *TESTS)
    assert [path for path in sorted(named) if not any(list(place.glob(path)) for place in places)] == []


def test_tests_that_are_named_are_there(document: Path) -> None:
    for file, test in _TEST.findall(document.read_text()):
        found = [place / file for place in TESTS if (place / file).exists()]
        defined = re.compile(rf"^def {test}\(|^{test} = ", re.MULTILINE)
        assert found and defined.search(found[0].read_text()), f"{file}::{test}"


def test_whatever_goes_together_has_a_test() -> None:
    """Each cell of the last table of docs/decoding.md."""
    _, _, section = (ROOT / "docs" / "decoding.md").read_text().partition("## What goes with what")
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    assert len(rows) == 6
    for method, *cells in rows:
        assert len(cells) == len(head) - 1, method
        assert [cell for cell in cells if not _TEST.search(cell)] == [], method


def test_commands_and_their_options_are_there(document: Path) -> None:
    for snippet in snippets(document.read_text()):
        for arguments in commands(words_of(snippet), "tandem"):
            command, rest = resolve(arguments)
            known = {
                option
                for param in command.params
                if isinstance(param, TyperOption)
                for option in (*param.opts, *param.secondary_opts)
            }
            given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
            assert given <= known | {"--help"}, snippet


def test_paths_of_set_are_those_of_the_config(document: Path) -> None:
    for snippet in snippets(document.read_text()):
        words = words_of(snippet)
        for option, assignment in pairwise(words):
            if option == "--set" and "=" in assignment:
                _, problems = check_config(apply_overrides({}, [assignment]))
                assert [problem.render() for problem in problems] == [], snippet


def test_make_targets_and_modules_are_there(document: Path) -> None:
    for snippet in snippets(document.read_text()):
        words = words_of(snippet)
        if words[:1] == ["make"]:
            targets = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
            assert set(targets[:1]) <= _TARGETS, snippet
        for option, module in pairwise(words):
            if option == "-m" and module.split(".")[0] in PACKAGES:
                assert find_spec(module) is not None, snippet
