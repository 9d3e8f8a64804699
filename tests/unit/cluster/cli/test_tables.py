"""Tables at terminals of any width: no digit is ever cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from cluster.cli.tables import show, table


def shown(found: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, soft_wrap=True)
    show(console, found)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def three_rows() -> Table:
    found = table("name", "bytes", "tokens/s", "", left=("name",))
    found.add_row("one", "13,476,831,232", "81.5", "")
    found.add_row("two", "6,738,415,616", "248.25", "knee")
    found.add_row("three", "1", "7.25", "")
    return found


def test_a_wide_terminal_has_rows() -> None:
    assert shown(three_rows(), 60) == [
        "name            bytes  tokens/s",
        "one    13,476,831,232      81.5",
        "two     6,738,415,616    248.25  knee",
        "three               1      7.25",
    ]


def test_columns_become_lines_where_that_is_narrower() -> None:
    found = table(*(f"column {number}" for number in range(8)), left=("column 0",))
    found.add_row("a", *("1,234" for _ in range(7)))
    found.add_row("b", *("123.456" for _ in range(7)))
    assert shown(found, 40) == [
        "column 0      a        b",
        *(f"column {number}  1,234  123.456" for number in range(1, 8)),
    ]


def test_else_every_cell_has_a_line() -> None:
    lines = shown(three_rows(), 30)
    assert lines[:4] == ["name      one", "bytes     13,476,831,232", "tokens/s  81.5", ""]
    assert lines[4:8] == ["name      two", "bytes     6,738,415,616", "tokens/s  248.25", "          knee"]


@pytest.mark.parametrize("width", [1, 10, 20, 37, 38, 40, 80])
def test_every_digit_is_there(width: int) -> None:
    text = "\n".join(shown(three_rows(), width))
    assert "…" not in text
    assert all(number in text for number in ("13,476,831,232", "6,738,415,616", "248.25"))


def test_prose_is_wrapped_and_numbers_are_not() -> None:
    found = table("part", "bytes", "formula", left=("part",), prose="formula")
    found.add_row("weights", "13,476,831,232", "6,738,415,616 parameters times two bytes each, and \\[more]")
    lines = shown(found, 60)
    assert lines[1].startswith("weights  13,476,831,232  6,738,415,616 parameters")
    assert "[more]" in "".join(lines) and max(map(len, lines)) <= 60
