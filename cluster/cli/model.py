"""`tandem model`: the embedded model's folder, and what a model folder holds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cluster.cli.convert import convert
from cluster.cli.folders import embedded_folder, folder_of
from cluster.cli.options import JsonOption
from cluster.cli.quantize import quantize
from cluster.cli.services import services_of
from cluster.cli.terminal import Terminal, waiting
from cluster.config.problems import ConfigError, Problem
from cluster.models.embedded import SMOLLM2
from cluster.plan.arithmetic import num_parameters
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.spec import legal_tensor_parallel

NameArgument = Annotated[
    str,
    typer.Argument(metavar="[NAME]", help="The embedded model's name, or a folder in Hugging Face layout."),
]

app = typer.Typer(help="The embedded model and model folders.", no_args_is_help=True)
app.command()(quantize)
app.command()(convert)


@app.command()
def fetch(context: typer.Context, as_json: JsonOption = False) -> None:
    """Convert the embedded model into the cache, or check the hashes of what is there."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        folder = embedded_folder(terminal, services_of(context))
        if as_json:
            terminal.emit(name=SMOLLM2.name, folder=str(folder))
        else:
            terminal.say(str(folder))


@app.command()
def path(context: typer.Context, name: NameArgument = SMOLLM2.name, as_json: JsonOption = False) -> None:
    """Print the folder of a model, and nothing else; the embedded one is converted first when needed."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        folder = folder_of(terminal, services_of(context), name)
        if as_json:
            terminal.emit(name=name, folder=str(folder))
        else:
            typer.echo(folder)


@app.command()
def inspect(context: typer.Context, name: NameArgument = SMOLLM2.name, as_json: JsonOption = False) -> None:
    """Show what a model folder holds, and in how many ranks it can be split. Reads headers only."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        folder = folder_of(terminal, services_of(context), name)
        try:
            with waiting(terminal, "reading headers and hashes"):
                facts = describe(Checkpoint(folder))
        except CheckpointError as error:
            raise ConfigError([Problem(path="", message=str(error))]) from error
        if as_json:
            terminal.emit(**facts)
            return
        terminal.show_facts(
            {
                name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                for name, value in facts.items()
            }
        )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts of an opened checkpoint, as plain values."""
    spec = checkpoint.spec
    tensors = checkpoint.tensors.values()
    experts = spec.experts
    # A tied head in few bits is stored beside its embedding, and is no further parameters.
    head = f"{spec.weights.head}.weight"
    is_tied = checkpoint.is_tied or (spec.tie_word_embeddings and checkpoint.stem(head) is not None)
    return {
        "folder": str(checkpoint.folder),
        "model_type": str(checkpoint.config.get("model_type")),
        "parameters": num_parameters(spec, is_tied=is_tied),
        "weight_bytes": checkpoint.weight_bytes,
        "stored_dtypes": sorted({tensor.entry.dtype for tensor in tensors}),
        "files": sorted({tensor.file.name for tensor in tensors}),
        "layers": spec.num_layers,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "experts": 0 if experts is None else experts.num_experts,
        "experts_per_token": 0 if experts is None else experts.num_per_token,
        "vocab_size": checkpoint.vocab_size,
        "max_model_len": checkpoint.max_model_len,
        "eos_token_ids": list(checkpoint.eos_token_ids),
        "tied_embeddings": checkpoint.is_tied,
        "tensor_parallel_sizes": legal_tensor_parallel(spec),
        "model_hash": checkpoint.model_hash(),
    }
