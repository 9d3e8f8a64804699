"""`tandem model quantize`: a model folder in few bits, written once, with a report of what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.child import MeasuringFailed
from cluster.bench.orders import QuantizeOrder
from cluster.cli.folders import folder_of
from cluster.cli.options import JsonOption, named_path
from cluster.cli.outputs import make_folder_of
from cluster.cli.services import services_of
from cluster.cli.terminal import CommandFailed, Phases, Terminal, UsageError
from cluster.figures.words import counted

_FORMS = ("int8", "int4")
_TIMEOUT_S = 6 * 3600.0  # for the largest models that one machine holds


def quantize(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder in Hugging Face layout, or the embedded model's name."),
    ],
    to: Annotated[str, typer.Option("--to", help="int8 or int4: of the layers; the head gets int8.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", parser=named_path, metavar="FOLDER", help="Folder to be made.")
    ],
    has_report: Annotated[
        bool, typer.Option("--report/--no-report", help="Score a text before and after: loads both models.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Write a model's weights in few bits, so that no start has to quantize them, and say what it costs."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes():
        if to not in _FORMS:
            raise UsageError(f"--to {to!r}: it is one of {', '.join(_FORMS)}")
        make_folder_of(out.expanduser())
        folder = folder_of(terminal, services, model)
        order = QuantizeOrder(
            model=str(folder.absolute()), form=to, out=str(out.expanduser().absolute()), has_report=has_report
        )
        try:
            with Phases(terminal) as phases:
                phases.start("starting")
                found = services.measure(order, phases.start, timeout_s=_TIMEOUT_S)
        except MeasuringFailed as error:
            raise CommandFailed(str(error)) from error
        if as_json:
            terminal.emit(**found)
        else:
            _print(terminal, found)


def _print(terminal: Terminal, found: Mapping[str, Any]) -> None:
    before, after, score = found["bytes_before"], found["bytes_after"], found["perplexity"]
    perplexity, matrices = "not measured", counted(found["matrices"], "matrix", "matrices")
    if score is not None:
        perplexity = (
            f"{score['before']:.2f} -> {score['after']:.2f} ({score['ratio'] - 1:+.1%}) "
            f"on {score['tokens']:,} tokens"
        )
    terminal.show_facts(
        {
            "folder": found["folder"],
            "weights": f"{before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB ({after / before:.0%})",
            "largest error": f"{found['worst_error']:.2%} of {found['worst_matrix']}",
            "mean error": f"{found['mean_error']:.2%} over {matrices}",
            "perplexity": perplexity,
            "time": f"{found['seconds']:.1f} s to write",
        }
    )
