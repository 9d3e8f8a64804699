"""What parts say: lines of JSON on stdout, as they are found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum


class Kind(Enum):
    """What a line is."""

    CHECK = "check"  # right or wrong
    TARGET = "target"  # of speed
    FIGURE = "figure"  # measured
    END = "end"  # of the part: all has been said


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line."""

    kind: Kind
    name: str
    is_met: bool = True  # of a check or target
    detail: str = ""
    values: dict[str, float]

    def to_line(self) -> str:
        return json.dumps(asdict(self) | {"kind": self.kind.value})


def check(name: str, is_right: bool, detail: str = "", **values: float) -> None:
    say(Finding(kind=Kind.CHECK, name=name, is_met=bool(is_right), detail=detail, values=values))


def target(name: str, is_met: bool, detail: str = "") -> None:
    say(Finding(kind=Kind.TARGET, name=name, is_met=bool(is_met), detail=detail, values={}))


def figure(name: str, **values: float) -> None:
    say(Finding(kind=Kind.FIGURE, name=name, values=values))


def end() -> None:
    say(Finding(kind=Kind.END, name="end", values={}))


def say(finding: Finding) -> None:
    print(finding.to_line(), flush=True)


def read(lines: Iterable[str]) -> list[Finding]:
    """Of a part's output. Lines of libraries, and one that was cut off, are passed over."""
    found = []
    for line in lines:
        try:
            values = json.loads(line)
            found.append(Finding(**(values | {"kind": Kind(values["kind"])})))
        except (ValueError, TypeError, KeyError):
            print(line, file=sys.stderr)
    return found
