"""`tandem bench`: what this machine and engine can do (calibrate, sweep, kv-cache), and how a running server
holds up under load (serve, replay; in `cluster.cli.load`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.chart_process import draw
from cluster.bench.child import MeasuringFailed
from cluster.bench.orders import CalibrateOrder, EngineSettings, KvCacheOrder, Order, SweepOrder
from cluster.bench.pool_check import pool_row
from cluster.cli import bench_tables
from cluster.cli.folders import folder_of
from cluster.cli.load import replay, serve
from cluster.cli.numbers import MOST_TOKENS, whole_number
from cluster.cli.options import ForceOption, JsonOption, finite, named_path
from cluster.cli.outputs import check_output, write_report
from cluster.cli.services import Services, services_of
from cluster.cli.terminal import CommandFailed, Phases, Terminal, UsageError
from cluster.config.leaves import CHOICES
from cluster.config.tree import EMBEDDED_MODEL
from cluster.plan.calibration import default_root, keep_calibration
from cluster.plan.memory import DoesNotFit
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.spec import check_tensor_parallel

app = typer.Typer(help="Measure this machine, the engine, or a running server.", no_args_is_help=True)
app.command()(serve)
app.command()(replay)

_LOAD_S = 300.0  # longest time to load a model, beside the measuring itself
_MOST_BATCH = 4096
_DTYPES, _QUANTIZATIONS = CHOICES["model.dtype"], CHOICES["model.quantization"]
_PATIENCE = 20.0  # times as long as it should take, on a busy machine
_TOKEN_S = 0.1  # that a token may take, of a large model on a busy machine

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="[MODEL]", help="Folder in Hugging Face layout; the embedded model by default."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, bfloat16 or float32.")]
QuantizationOption = Annotated[
    str, typer.Option("--quantization", help="auto (the model's own), none, int8, int4.")
]
RanksOption = Annotated[int, typer.Option("--tensor-parallel", min=1, help="Ranks of the group.")]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", parser=named_path, metavar="FILE", help="Report as JSON: rows, samples, machine."
    ),
]
PngOption = Annotated[
    Path | None, typer.Option("--png", parser=named_path, metavar="FILE", help="Picture (needs matplotlib).")
]


@app.command()
def calibrate(
    context: typer.Context,
    model: ModelArgument = EMBEDDED_MODEL,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "auto",
    tensor_parallel: RanksOption = 1,
    seconds: Annotated[
        float, typer.Option("--seconds", callback=finite, min=1, max=86_400, help="Time for measuring.")
    ] = 75.0,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine with a model and fit the cost of a step, which planning uses from then on."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes():
        check_output(default_root() / "calibration.json", force=True)  # where the result will be kept
        folder = folder_of(terminal, services, model)
        _check_fit(folder, dtype, ranks=tensor_parallel)
        settings = EngineSettings(
            model=str(folder),
            dtype=dtype,
            quantization=_setting_of(folder, quantization),
            tensor_parallel=tensor_parallel,
        )
        order = CalibrateOrder(engine=settings, seconds=seconds)
        result = _measured(terminal, services, order, timeout_s=_LOAD_S + _PATIENCE * seconds)
        file = keep_calibration(result)
        try:
            on_cpu = result["about"]["device"] == "cpu"  # a GPU is planned fuller than by default
            pool = pool_row(folder, settings, result["pool"]) if on_cpu else None
        except DoesNotFit as error:
            raise CommandFailed(str(error)) from error
        if as_json:
            terminal.emit(file=str(file), planned_pool=pool, **result)
        else:
            bench_tables.print_calibration(terminal, result, pool)
            terminal.say(f"kept in {file}")


@app.command()
def sweep(
    context: typer.Context,
    model: ModelArgument = EMBEDDED_MODEL,
    batches: Annotated[str, typer.Option("--batches", help="Comma-separated.")] = "1,8,32,64,128",
    prompt: Annotated[int, typer.Option("--prompt", min=1, max=MOST_TOKENS, help="Prompt tokens.")] = 512,
    output: Annotated[int, typer.Option("--output", min=2, max=MOST_TOKENS, help="New tokens.")] = 256,
    runs: Annotated[int, typer.Option("--runs", min=1, max=1000)] = 1,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "auto",
    tensor_parallel: RanksOption = 1,
    out: OutOption = None,
    png: PngOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Latency, TTFT, TPOT, throughput, KV use and utilisation over batch sizes, with the knee marked."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes():
        check_can_draw(png, force=force)
        check_output(out, force=force)
        sizes = _sizes(batches)
        folder = folder_of(terminal, services, model)
        _check_fit(folder, dtype, prompt=prompt, output=output, ranks=tensor_parallel)
        settings = EngineSettings(
            model=str(folder),
            dtype=dtype,
            quantization=_setting_of(folder, quantization),
            tensor_parallel=tensor_parallel,
            max_running=max(sizes),
            max_step_tokens=max(512, *sizes),
        )
        order = SweepOrder(engine=settings, batches=sizes, prompt_tokens=prompt, new_tokens=output, runs=runs)
        tokens = runs * sum(sizes) * (prompt + output)
        content = _measured(terminal, services, order, timeout_s=_LOAD_S + _TOKEN_S * tokens)
        _finish(terminal, content, out, png, bench_tables.print_sweep)


@app.command("kv-cache")
def kv_cache(
    context: typer.Context,
    model: ModelArgument = EMBEDDED_MODEL,
    prompt: Annotated[int, typer.Option("--prompt", min=1, max=MOST_TOKENS, help="Prompt tokens.")] = 64,
    output: Annotated[int, typer.Option("--output", min=2, max=MOST_TOKENS, help="New tokens.")] = 256,
    dtype: DtypeOption = "auto",
    out: OutOption = None,
    png: PngOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """One sequence with the KV cache and without: linear against quadratic time."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes():
        check_can_draw(png, force=force)
        check_output(out, force=force)
        folder = folder_of(terminal, services, model)
        _check_fit(folder, dtype, prompt=prompt, output=output)
        settings = EngineSettings(model=str(folder), dtype=dtype)
        order = KvCacheOrder(engine=settings, prompt_tokens=prompt, new_tokens=output)
        passes = output * (prompt + output)
        content = _measured(terminal, services, order, timeout_s=_LOAD_S + _TOKEN_S * passes)
        _finish(terminal, content, out, png, bench_tables.print_kv_cache)


def check_can_draw(png: Path | None, *, force: bool) -> None:
    """Before anything is measured. Raises CommandFailed."""
    check_output(png, force=force)
    if png is not None and find_spec("matplotlib") is None:
        raise CommandFailed("--png needs matplotlib: pip install 'tandem[bench]'")


def _check_fit(folder: Path, dtype: str, *, prompt: int = 1, output: int = 1, ranks: int = 1) -> None:
    """Before an engine is started, which takes long. Raises UsageError, and CommandFailed for the folder."""
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype!r}: it is one of {', '.join(_DTYPES)}")
    try:
        checkpoint = Checkpoint(folder)
        check_tensor_parallel(checkpoint.spec, ranks)
    except CheckpointError as error:
        raise CommandFailed(str(error)) from error
    except TensorParallelError as error:
        raise UsageError(f"--tensor-parallel {ranks}: {error}") from error
    if prompt + output > checkpoint.max_model_len:
        raise UsageError(
            f"--prompt {prompt:,} and --output {output:,} are {prompt + output:,} tokens together, the model "
            f"takes at most {checkpoint.max_model_len:,}"
        )


def _setting_of(folder: Path, quantization: str) -> str:
    """`--quantization`, without `auto` where that is the same as `none`. Raises UsageError, and CommandFailed
    for a folder that cannot be opened."""
    if quantization not in _QUANTIZATIONS:
        raise UsageError(f"--quantization {quantization!r}: it is one of {', '.join(_QUANTIZATIONS)}")
    if quantization != "auto":
        return quantization
    try:
        return Checkpoint(folder).quantization(quantization)
    except CheckpointError as error:
        raise CommandFailed(str(error)) from error


def _finish(
    terminal: Terminal,
    content: Mapping[str, Any],
    out: Path | None,
    png: Path | None,
    show: bench_tables.Printer,
) -> None:
    if terminal.as_json:
        terminal.emit(**{name: value for name, value in content.items() if name != "samples"})
    else:
        show(terminal, content)
    # After what was measured for so long has been shown.
    if out is not None:
        write_report(out, content)
        terminal.say(f"report in {out}")
    if png is not None:
        try:
            draw(content, png)
        except MeasuringFailed as error:
            raise CommandFailed(f"{png}: {error}") from error
        terminal.say(f"picture in {png}")


def _measured(terminal: Terminal, services: Services, order: Order, *, timeout_s: float) -> Mapping[str, Any]:
    try:
        with Phases(terminal) as phases:
            phases.start("starting")
            return services.measure(order, phases.start, timeout_s=timeout_s)
    except MeasuringFailed as error:
        raise CommandFailed(str(error)) from error


def _sizes(text: str) -> tuple[int, ...]:
    """Batch sizes, ascending, each once."""
    sizes = {whole_number(part.strip(), most=_MOST_BATCH) for part in text.split(",")}
    found = tuple(sorted(size for size in sizes if size))
    if len(found) < len(sizes):
        raise UsageError(
            f"--batches {text[:100]!r}: give numbers from 1 to {_MOST_BATCH} with commas between them"
        )
    return found
