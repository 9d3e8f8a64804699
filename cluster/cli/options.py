"""Options that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

_LEAST_DIVISOR, _MOST_DIVISOR = 1e-6, 1e6
MOST_RATE = 1e6  # requests a second


def finite(value: float | None) -> float | None:
    """For options: click's own bounds let infinities and NaN pass, with which no wait would end."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


def above_zero(value: float | None) -> float | None:
    """As `finite`, and above 0."""
    finite(value)
    if value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return value


def divisor(value: float) -> float:
    """For options that scale a trace: beyond these, times and lengths have no meaning any more."""
    above_zero(value)
    if not _LEAST_DIVISOR <= value <= _MOST_DIVISOR:
        raise typer.BadParameter(f"{value:g} is not between {_LEAST_DIVISOR:g} and {_MOST_DIVISOR:g}.")
    return value


def named_path(text: str) -> Path:
    """A file or folder of the command line; an empty name would be the working folder."""
    if not text:
        raise typer.BadParameter("it is empty.")
    return Path(text)


def http_url(value: str | None) -> str | None:
    """For options: an address with a host in it, without the slash at its end."""
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # as connections will: http://127..0.1 has no such name
    except ValueError:
        is_url = False
    if not is_url or any(character.isspace() for character in value):
        raise typer.BadParameter("it must be like http://HOST:PORT.")
    return value.rstrip("/")


def json_lines(for_each: str) -> Any:
    """`--json` of a command that tells one thing after the other."""
    return typer.Option("--json", help=f"Print JSON, a line for {for_each}, and one for a failure.")


def plain_url(value: str | None) -> str | None:
    """As `http_url`, and no name or password in it: the list of processes and messages would show them."""
    found = http_url(value)
    if found is not None and "@" in urlsplit(found).netloc:
        raise typer.BadParameter(
            "it must be without name and password: an API key is read from --api-keys-file, Ray's token from "
            "RAY_AUTH_TOKEN or its file."
        )
    return found


ReadyOption = Annotated[float, typer.Option("--timeout-s", callback=finite, help="Longest time until ready.")]
StepReadyOption = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        callback=finite,
        help="Longest time until ready; of each of the two steps where other pools take over.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a value of the config, e.g. router.policy=round_robin."
    ),
]
PortOption = Annotated[int | None, typer.Option("--port", help="HTTP port instead of the file's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, also of a failure.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]
OpenOption = Annotated[
    bool, typer.Option("--i-know-this-is-open", help="Accept an HTTP host that other machines can reach.")
]
KeysOption = Annotated[
    str | None,
    typer.Option(
        "--api-keys-file",
        metavar="FILE",
        help="For a service that wants an API key: the file's first is sent.",
    ),
]
DashboardOption = Annotated[
    str | None,
    typer.Option(
        "--dashboard", callback=plain_url, metavar="URL", help="Ray dashboard of an existing cluster."
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", callback=plain_url, metavar="URL", help="Server; the running `tandem serve` by default."
    ),
]
