"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a value of the config, e.g. router.policy=round_robin."
    ),
]
PortOption = Annotated[int | None, typer.Option("--port", help="HTTP port instead of the file's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
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
    str | None, typer.Option("--dashboard", metavar="URL", help="Ray dashboard of an existing cluster.")
]
