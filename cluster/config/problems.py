"""What is wrong with a configuration, one entry a mistake, all of them at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

_POSITION = re.compile(r"\[([0-9]{1,9})\]")  # in a list, as `join` writes it; keys may hold brackets, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake: where it is, what is wrong, and what would be right."""

    path: str  # dotted name of the key, as for `--set`; empty: the file as a whole
    message: str
    got: str = ""
    allowed: str = ""
    hint: str = ""
    file: str = ""
    line: int | None = None  # 1-based

    def render(self) -> str:
        """`file:line:key: problem; got X; allowed Y; hint`, leaving out what is not known."""
        place = ":".join(part for part in (self.file, str(self.line or ""), self.path) if part)
        parts = [self.message]
        if self.got:
            parts.append(f"got {self.got}")
        if self.allowed:
            parts.append(f"allowed: {self.allowed}")
        if self.hint:
            parts.append(self.hint)
        text = "; ".join(parts)
        return f"{place}: {text}" if place else text


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` has every mistake found; the text lists them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.render() for problem in self.problems))


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that the word is most likely a misspelling of, if any is near enough."""
    lowered = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[matches[0]] if matches else None


def unknown_key(path: str, key: str, allowed: Iterable[str], *, line: int | None = None) -> Problem:
    """The problem of a key nobody reads. `path` is the dotted name including the key."""
    names = sorted(allowed)
    guess = closest(key, names)
    return Problem(
        path=path,
        message="unknown key",
        got=repr(key),
        allowed=", ".join(names),
        hint=f"did you mean {guess}?" if guess else "",
        line=line,
    )


def parts_of(path: str) -> tuple[str | int, ...]:
    """The reverse of `join`."""
    return tuple(
        int(found[1]) if (found := _POSITION.fullmatch(part)) else part
        for part in _POSITION.sub(r".[\1]", path).split(".")
    )


def join(*parts: str | int) -> str:
    """Dotted name of a path; list positions as [i]."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
