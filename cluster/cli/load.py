"""`tandem bench serve` and `tandem bench replay`: open-loop load against a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.client import ServedModel, ServerUnusable
from cluster.bench.latency import Limits, Outcome, summary
from cluster.bench.load import Due, Server, of_trace, poisson
from cluster.bench.report import Report, write_report
from cluster.cli import bench_tables
from cluster.cli.keys import service_at
from cluster.cli.options import JsonOption, KeysOption, finite
from cluster.cli.services import services_of
from cluster.cli.terminal import CommandFailed, Phases, Terminal
from cluster.figures.traces import TraceError, mean_lengths, mean_rate, read_trace, scaled

UrlOption = Annotated[
    str | None, typer.Option("--url", help="Server; the running `tandem serve` by default.")
]
TtftOption = Annotated[
    float | None,
    typer.Option("--ttft", callback=finite, metavar="MS", min=0, help="Most for a good request."),
]
TpotOption = Annotated[
    float | None,
    typer.Option("--tpot", callback=finite, metavar="MS", min=0, help="Most for a good request."),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout-s", callback=finite, min=1, help="For one whole answer.")
]
VocabOption = Annotated[
    int, typer.Option("--vocab-size", min=100, help="Made-up prompts use token ids below it.")
]
OutOption = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="Report as JSON: rows, samples, machine.")
]


def serve(
    context: typer.Context,
    url: UrlOption = None,
    rate: Annotated[str, typer.Option("--rate", help="Requests a second; several with commas.")] = "1",
    requests: Annotated[int, typer.Option("--requests", min=1, help="At each rate.")] = 100,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Prompt tokens.")] = 512,
    output: Annotated[int, typer.Option("--output", min=1, help="New tokens.")] = 128,
    shared: Annotated[int, typer.Option("--shared", min=0, help="Tokens that all prompts begin with.")] = 0,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    vocab_size: VocabOption = 1000,
    timeout_s: TimeoutOption = 600.0,
    keys_file: KeysOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Poisson arrivals at given rates: percentiles, and goodput within --ttft and --tpot."""
    terminal = Terminal(as_json=as_json, progress_to_stderr=True)
    with terminal.exit_codes():
        rates = _rates(rate)

        def make(per_s: float, place: int) -> Callable[[ServedModel], Iterable[Due]]:
            return lambda _: poisson(
                rate=per_s,
                requests=requests,
                prompt=prompt,
                output=output,
                vocab_size=vocab_size,
                seed=seed + place,  # or a later rate would find its prompts cached
                shared=shared,
            )

        load = {
            "arrivals": "poisson",
            "rates": rates,
            "requests": requests,
            "prompt_tokens": prompt,
            "new_tokens": output,
            "shared_tokens": shared,
            "seed": seed,
        }
        runs = {f"{per_s:g}/s": make(per_s, place) for place, per_s in enumerate(rates)}
        server = _server(context, url, keys_file, timeout_s)
        _run(context, terminal, "serve", server, runs, load, Limits(ttft_ms=ttft, tpot_ms=tpot), out)


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake .jsonl or Azure .csv file.")],
    url: UrlOption = None,
    length_divisor: Annotated[
        float,
        typer.Option(
            "--length-divisor", callback=finite, help="Prompts and answers are that many times shorter."
        ),
    ] = 1.0,
    rate_divisor: Annotated[
        float,
        typer.Option("--rate-divisor", callback=finite, help="Requests come that many times less often."),
    ] = 1.0,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="The first so many only.")] = None,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    vocab_size: VocabOption = 1000,
    timeout_s: TimeoutOption = 600.0,
    keys_file: KeysOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """A production trace at its own times, scaled; equal prefixes in the trace are equal prefixes here."""
    terminal = Terminal(as_json=as_json, progress_to_stderr=True)
    with terminal.exit_codes():
        try:
            found = scaled(
                read_trace(trace, limit=requests), length_divisor=length_divisor, rate_divisor=rate_divisor
            )
        except (TraceError, ValueError) as error:
            raise CommandFailed(str(error)) from error
        prompt, output = mean_lengths(found)
        load = {
            "arrivals": "trace",
            "trace": trace.name,
            "length_divisor": length_divisor,
            "rate_divisor": rate_divisor,
            "requests": len(found),
            "mean_prompt_tokens": round(prompt, 1),
            "mean_new_tokens": round(output, 1),
            "mean_rate": round(mean_rate(found), 4) if len(found) > 1 else None,
        }

        def make(model: ServedModel) -> Iterable[Due]:
            return of_trace(found, vocab_size=vocab_size, longest=model.max_model_len)

        server = _server(context, url, keys_file, timeout_s)
        limits = Limits(ttft_ms=ttft, tpot_ms=tpot)
        _run(context, terminal, "replay", server, {trace.name: make}, load, limits, out)


def _run(
    context: typer.Context,
    terminal: Terminal,
    kind: str,
    server: Server,
    runs: Mapping[str, Callable[[ServedModel], Iterable[Due]]],
    load: Mapping[str, Any],
    limits: Limits,
    out: Path | None,
) -> None:
    """Runs each load, prints its row, writes the report. Exit code 1 when nothing was answered."""
    rows: list[dict[str, Any]] = []
    models: list[ServedModel] = []

    def noted(make: Callable[[ServedModel], Iterable[Due]]) -> Callable[[ServedModel], Iterable[Due]]:
        """The same, remembering the model that it was asked for."""

        def give(model: ServedModel) -> Iterable[Due]:
            models.append(model)
            return make(model)

        return give

    samples: dict[str, Sequence[Outcome]] = {}
    with Phases(terminal) as phases:
        for name, make in runs.items():
            phases.start(f"{name}: sending")
            try:
                outcomes = services_of(context).run_load(server, noted(make), phases.start)
            except ServerUnusable as error:
                raise CommandFailed(str(error)) from error
            samples[name] = outcomes
            rows.append({"load": name, **summary(outcomes, limits)})
    report = Report(
        kind=kind,
        rows=rows,
        config={"url": server.url, "timeout_s": server.timeout_s, **asdict(models[-1])},
        load={**load, "limits": asdict(limits)},
        samples={name: [asdict(outcome) for outcome in found] for name, found in samples.items()},
        ceilings={},
    ).content()
    if out is not None:
        write_report(report, out)
    if terminal.as_json:
        terminal.emit(**{name: value for name, value in report.items() if name != "samples"})
    else:
        bench_tables.print_load(terminal, rows, limits)
        if out is not None:
            terminal.say(f"report in {out}")
    if failed := [outcome for found in samples.values() for outcome in found if not outcome.is_answered]:
        terminal.progress.print(f"{len(failed)} requests failed; the first: {failed[0].error}", markup=False)
    if not any(row["answered"] for row in rows):
        raise typer.Exit(1)


def _server(context: typer.Context, url: str | None, keys_file: str | None, timeout_s: float) -> Server:
    service = service_at(services_of(context), url, keys_file)
    return Server(url=service.url, headers=service.headers, timeout_s=timeout_s)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise CommandFailed(f"--rate {text!r}: give requests a second, above 0, with commas between several")
    return rates
