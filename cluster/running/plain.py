"""Serve's messages and Ray's logs in words for people."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MAX_CHARS = 300  # of a message in one line


def without_colours(text: str) -> str:
    """Ray's words without what colours them on a terminal."""
    return _COLOUR.sub("", text)


def plain_message(message: str) -> str:
    """Serve's message with each trace of Python calls replaced by the exception that ended it."""
    kept: list[str] = []
    ending: list[str] = []  # the newest exception of the trace being read, all lines of its text
    is_trace = False
    for line in without_colours(message).splitlines():
        if line.startswith(("Traceback ", "ray::")):
            is_trace = True
        elif not is_trace:
            kept.append(line)
        elif line.startswith(("During handling of", "The above exception")):
            ending = []  # the next one tells the reader more
        elif re.match(r"(\w+\.)*\w*(Error|Exception|Failure)\b", line):
            ending = [re.sub(r"^(\w+\.)+(?=\w+)", "", line)]
        elif ending and line.strip():
            ending.append(line)
    return "\n".join(line for line in [*kept, *ending] if line.strip())


def in_one_line(message: object) -> str:
    """The plain message of Serve for a place with one line."""
    return " ".join(plain_message(str(message or "")).split())[:_MAX_CHARS]
