"""`tandem model convert`: a GGUF file as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import JsonOption, named_path
from cluster.cli.outputs import make_folder_of
from cluster.cli.terminal import CommandFailed, Phases, Terminal
from cluster.models.gguf_folder import convert_file
from cluster.models.gguf_model import GgufError


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file of Llama, Qwen2 or Qwen3.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", parser=named_path, metavar="FOLDER", help="Folder to be made.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Convert a GGUF file to a model folder in bfloat16; `model quantize` makes 4 or 8 bits of it again."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        make_folder_of(out.expanduser())
        try:
            with Phases(terminal) as phases:
                convert_file(file.expanduser(), out.expanduser(), phases.start)
        except (GgufError, OSError) as error:
            raise CommandFailed(str(error)) from error
        if as_json:
            terminal.emit(folder=str(out))
        else:
            terminal.say(str(out))
