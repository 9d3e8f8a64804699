"""Tables that never cut a digit: as rows where the terminal is wide enough, else turned, else row by row.

A table whose last column is prose may wrap that one. Where even that does not fit, columns become lines, and
where there are too many rows for this, every row becomes a few lines of heading and value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

_LEAST_PROSE = 24  # columns of a terminal that prose is wrapped into at least
_GAP = 2
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


def visible(text: str) -> str:
    """What others sent, for a terminal: characters that would steer it are written out."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text.replace("\r\n", "\n"))


class _Table(Table):
    def add_row(
        self,
        *renderables: RenderableType | None,
        style: StyleType | None = None,
        end_section: bool = False,
    ) -> None:
        made = [visible(cell) if isinstance(cell, str) else cell for cell in renderables]
        super().add_row(*made, style=style, end_section=end_section)


def table(*headings: str, left: Sequence[str] = (), prose: str = "") -> Table:
    """An empty one. Cells are markup; columns are to the right but those named in `left`. `prose` is the
    column that may be wrapped."""
    made = _Table(box=None, pad_edge=False)
    for heading in headings:
        is_prose = heading == prose and bool(prose)
        made.add_column(
            heading,
            justify="left" if is_prose or heading in left else "right",
            no_wrap=not is_prose,
            overflow="fold" if is_prose else "ellipsis",
            min_width=_LEAST_PROSE if is_prose else None,
        )
    return made


def show(console: Console, found: Table) -> None:
    """Prints a table in the form that the console is wide enough for."""
    if _fits(console, found):
        console.print(found)
    elif _fits(console, turned := _turned(found)):
        console.print(turned)
    else:
        for line in _row_by_row(found):
            console.print(line)


def _fits(console: Console, found: Table) -> bool:
    options = console.options.update(width=10_000)
    return Measurement.get(console, options, found).minimum <= console.width


def _texts(found: Table) -> list[list[Text]]:
    """Heading and cells of each column."""
    return [
        [Text.from_markup(str(cell)) for cell in (column.header, *column.cells)] for column in found.columns
    ]


def _turned(found: Table) -> Table:
    """Columns as lines."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    for _ in range(found.row_count):
        made.add_column(justify="right", no_wrap=True)
    for column in _texts(found):
        made.add_row(*column)
    return made


def _row_by_row(found: Table) -> Iterator[Text]:
    """A line for each cell that is not empty, and an empty line between rows."""
    columns = _texts(found)
    width = max((column[0].cell_len for column in columns), default=0) + _GAP
    for row in range(1, found.row_count + 1):
        if row > 1:
            yield Text()
        for column in columns:
            heading, cell = column[0], column[row]
            if cell.plain:
                yield Text(heading.plain.ljust(width)) + cell
