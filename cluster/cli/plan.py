"""`tandem plan`: what fits on a device and how fast it is, and a deployment that meets targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.numbers import MOST_TOKENS
from cluster.cli.options import MOST_RATE, ForceOption, JsonOption, above_zero, divisor, finite, named_path
from cluster.cli.outputs import check_output, write_output
from cluster.cli.plan_tables import (
    Proposed,
    plan_facts,
    print_plan,
    print_proposal,
    proposal_facts,
    refused_lines,
)
from cluster.cli.terminal import CommandFailed, Terminal, UsageError, waiting
from cluster.config.leaves import CHOICES, RANGES
from cluster.config.tree import EMBEDDED_MODEL
from cluster.figures.machine import usable_cores
from cluster.figures.step_cost import StepCostError
from cluster.figures.traces import TraceError, read_trace, scaled
from cluster.plan.demand import Demand, Targets, TooLong, of_trace
from cluster.plan.deployment import deployment_text
from cluster.plan.devices import UnknownDevice, device_names
from cluster.plan.limits import BATCHES
from cluster.plan.memory import DoesNotFit, Shape, plan_memory
from cluster.plan.models import REFERENCES, PlannedModel, UnknownModel, find_model
from cluster.plan.plan import Plan, find_speed, make_plan, propose, smallest_ranks
from cluster.plan.proposal import NotReachable
from workers.config import CacheConfig, ScheduleConfig
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.spec import check_tensor_parallel

_PROMPT, _OUTPUT = 512, 256  # tokens of a request, with --rate
_REFUSED = (CheckpointError, DoesNotFit, NotReachable, StepCostError, TooLong, TraceError)


def _most(path: str) -> int:
    """The largest value that a pool's config may have."""
    return int(RANGES[f"pools.*.{path}"].most)


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"Folder, config.json, {', '.join(REFERENCES)}."),
    ] = EMBEDDED_MODEL,
    device: Annotated[str, typer.Option("--device", help=f"One of {', '.join(device_names())}.")] = "this",
    context: Annotated[
        int, typer.Option("--context", min=1, max=MOST_TOKENS, help="Longest request, tokens.")
    ] = 2048,
    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, max=MOST_TOKENS, help="Decode batches to show; may be repeated."),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", min=1, help="Ranks of a group; chosen by default.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    quantization: Annotated[
        str, typer.Option("--quantization", help="auto (the model's own), none, int8 or int4.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Of keys and values: auto or int8.")] = "auto",
    block_size: Annotated[int, typer.Option("--block-size", min=1, max=_most("cache.block_size"))] = 16,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, max=_most("schedule.max_running"))
    ] = ScheduleConfig().max_running,
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", min=1, max=_most("schedule.max_step_tokens"))
    ] = ScheduleConfig().max_step_tokens,
    efficiency: Annotated[
        float,
        typer.Option(
            "--efficiency", callback=finite, min=0.01, max=1.0, help="Share of a datasheet that is reached."
        ),
    ] = 0.6,
    ttft: Annotated[
        float | None, typer.Option("--ttft", callback=above_zero, metavar="MS", help="For 90 % of requests.")
    ] = None,
    tpot: Annotated[
        float | None, typer.Option("--tpot", callback=above_zero, metavar="MS", help="For a token.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", callback=above_zero, max=MOST_RATE, help="Requests a second.")
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option("--prompt", min=1, max=MOST_TOKENS, help="Mean prompt tokens, with --rate; else 512."),
    ] = None,
    output: Annotated[
        int | None,
        typer.Option("--output", min=1, max=MOST_TOKENS, help="Mean new tokens, with --rate; else 256."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Lengths and busiest minute of a trace.")
    ] = None,
    length_divisor: Annotated[
        float, typer.Option("--length-divisor", callback=divisor, help="Shorten the trace.")
    ] = 1.0,
    rate_divisor: Annotated[
        float, typer.Option("--rate-divisor", callback=divisor, help="Slow the trace down.")
    ] = 1.0,
    model_path: Annotated[
        str | None,
        typer.Option("--model-path", metavar="FOLDER", help="For -o, where MODEL is no folder."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", parser=named_path, metavar="FILE", help="Write a deployment file."),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Memory, requests that fit, limits; with --ttft and --tpot and a --rate or --trace, groups and pools."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        check_output(out, force=force)
        with waiting(terminal, "planning"), _refusals():
            found = find_model(model)
            folder = _folder_of(found, model_path) if out is not None else ""
            shape = Shape(
                context=context,
                dtype=dtype,
                quantization=found.quantization(quantization),
                cache=CacheConfig(block_size=block_size, dtype=kv_dtype),
                schedule=ScheduleConfig(max_running=max_running, max_step_tokens=step_tokens),
            )
            _check_shape(found, shape)
            shape = replace(shape, forms=found.forms(quantization, dtype))
            planned_device, speed = find_speed(found, device.lower(), shape, efficiency)
            if tensor_parallel is not None:
                check_tensor_parallel(found.spec, tensor_parallel)
            ranks = tensor_parallel or smallest_ranks(found, planned_device, shape)
            made = make_plan(
                found, planned_device, speed, replace(shape, tensor_parallel=ranks), batches or BATCHES
            )
            demand = _demand(rate, prompt, output, trace, length_divisor, rate_divisor)
            targets = _targets(ttft, tpot, demand, out)
            proposed = None
            if demand is not None and targets is not None:
                served = demand.within(context)
                proposed = Proposed(served, *propose(made, served, targets, tensor_parallel))
        if out is not None and proposed is not None:
            _write(out, made, proposed, folder)
        if as_json:
            terminal.emit(**plan_facts(made), proposal=None if proposed is None else proposal_facts(proposed))
            return
        print_plan(terminal, made)
        if proposed is not None:
            print_proposal(terminal, proposed, context)
        if out is not None:
            terminal.say(f"deployment in {out}; check it with `tandem validate {out}`")


@contextmanager
def _refusals() -> Iterator[None]:
    """What cannot be planned, in the words of the commands."""
    try:
        yield
    except (UnknownModel, UnknownDevice, TensorParallelError) as error:
        raise UsageError(str(error)) from error
    except _REFUSED as error:
        raise CommandFailed(str(error)) from error


def _folder_of(model: PlannedModel, given: str | None) -> str:
    """For a deployment file. Raises UsageError where no folder is known."""
    folder = given or model.path
    if folder is None:
        raise UsageError(
            f"-o: {model.name} is known by its sizes only; say where its folder is with --model-path"
        )
    return folder


def _check_shape(model: PlannedModel, shape: Shape) -> None:
    """Raises UsageError."""
    if shape.context > model.spec.max_model_len:
        most = model.spec.max_model_len
        raise UsageError(f"--context {shape.context:,}: {model.name} allows at most {most:,}")
    for option, value, legal in (
        ("--dtype", shape.dtype, [name for name in CHOICES["model.dtype"] if name != "auto"]),
        ("--quantization", shape.quantization, CHOICES["model.quantization"]),
        ("--kv-dtype", shape.cache.dtype, CHOICES["pools.*.cache.dtype"]),
    ):
        if value not in legal:
            raise UsageError(f"{option} {value!r}: it is one of {', '.join(legal)}")


def _demand(
    rate: float | None,
    prompt: int | None,
    output: int | None,
    trace: Path | None,
    length_divisor: float,
    rate_divisor: float,
) -> Demand | None:
    if rate is None and (prompt is not None or output is not None):
        raise UsageError("--prompt and --output are for --rate, which is not given")
    if trace is not None:
        if rate is not None:
            raise UsageError("--rate and --trace are both given: the trace says how often requests come")
        requests = scaled(read_trace(trace), length_divisor=length_divisor, rate_divisor=rate_divisor)
        return of_trace(requests, trace.name)
    if rate is None:
        return None
    lengths = (_PROMPT if prompt is None else prompt, _OUTPUT if output is None else output)
    return Demand(
        rate=rate, lengths=[lengths], source=f"prompts of {lengths[0]:,}, {lengths[1]:,} new tokens"
    )


def _targets(
    ttft: float | None, tpot: float | None, demand: Demand | None, out: Path | None
) -> Targets | None:
    """None where nothing is to be proposed."""
    given = ttft is not None or tpot is not None or demand is not None or out is not None
    if ttft is None or tpot is None or demand is None:
        if given:
            raise UsageError("a proposal needs --ttft, --tpot, and --rate or --trace")
        return None
    return Targets(ttft_s=ttft / 1e3, tpot_s=tpot / 1e3)


def _write(out: Path, made: Plan, proposed: Proposed, folder: str) -> None:
    """Writes what `tandem validate` accepts, but for the model's folder on another machine. Raises
    CommandFailed."""
    demand, proposal = proposed.demand, proposed.proposal
    ranks = proposal.pools[0].tensor_parallel  # of all groups; the plan's own memory is of the fewest that do
    notes = [
        f"{made.model.name} on {proposal.devices} x {made.device.name}, as `tandem plan` proposed it for",
        f"{demand.rate:.3g} requests a second ({demand.source}):",
        f"TTFT of 90 % within {proposal.ttft_p90_s:.3g} s, {proposal.tpot_s * 1e3:.3g} ms a token.",
        *(f"{line}." for line in refused_lines(demand, made.shape.context)),
        f"Speed: {made.speed.source}",
    ]
    text = deployment_text(
        proposal,
        model_path=folder,
        device=made.device,
        shape=made.shape,
        memory=plan_memory(made.model, made.device, replace(made.shape, tensor_parallel=ranks)),
        cores=usable_cores(),
        notes=notes,
    )
    write_output(out, text)
