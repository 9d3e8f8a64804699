"""`tandem bench serve` and `tandem bench replay`: open-loop load against a running server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.client import ServedModel, ServerUnusable
from cluster.bench.latency import Limits, Outcome, summary
from cluster.bench.load import Due, MakeLoad, Server, of_trace, poisson
from cluster.bench.report import Report
from cluster.cli import bench_tables
from cluster.cli.keys import service_at
from cluster.cli.numbers import MOST_REQUESTS, MOST_TOKENS
from cluster.cli.options import ForceOption, JsonOption, KeysOption, UrlOption, divisor, finite, named_path
from cluster.cli.outputs import check_output, write_report
from cluster.cli.services import Services, services_of
from cluster.cli.terminal import CommandFailed, Phases, Terminal, UsageError
from cluster.figures.traces import TraceError, mean_lengths, mean_rate, read_trace, scaled
from cluster.figures.words import counted

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
    int,
    typer.Option("--vocab-size", min=100, max=MOST_TOKENS, help="Made-up prompts use token ids below it."),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", parser=named_path, metavar="FILE", help="Report as JSON: rows, samples, machine."
    ),
]


def serve(
    context: typer.Context,
    url: UrlOption = None,
    rate: Annotated[str, typer.Option("--rate", help="Requests a second; several with commas.")] = "1",
    requests: Annotated[
        int, typer.Option("--requests", min=1, max=MOST_REQUESTS, help="At each rate.")
    ] = 100,
    prompt: Annotated[int, typer.Option("--prompt", min=1, max=MOST_TOKENS, help="Prompt tokens.")] = 512,
    output: Annotated[int, typer.Option("--output", min=1, max=MOST_TOKENS, help="New tokens.")] = 128,
    shared: Annotated[
        int, typer.Option("--shared", min=0, max=MOST_TOKENS, help="Tokens that all prompts begin with.")
    ] = 0,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    vocab_size: VocabOption = 1000,
    timeout_s: TimeoutOption = 600.0,
    keys_file: KeysOption = None,
    out: OutOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Poisson arrivals at given rates: percentiles, and goodput within --ttft and --tpot."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        check_output(out, force=force)
        rates = _rates(rate)
        runs = {
            _rate_name(per_s): _for_any_model(
                partial(
                    poisson,
                    rate=per_s,
                    requests=requests,
                    prompt=prompt,
                    output=output,
                    vocab_size=vocab_size,
                    seed=seed + place,  # or a later rate would find its prompts cached
                    shared=shared,
                )
            )
            for place, per_s in enumerate(rates)
        }
        load = {
            "arrivals": "poisson",
            "rates": rates,
            "requests": requests,
            "prompt_tokens": prompt,
            "new_tokens": output,
            "shared_tokens": shared,
            "seed": seed,
        }
        services = services_of(context)
        test = LoadTest(
            kind="serve",
            server=_server(services, url, keys_file, timeout_s),
            runs=runs,
            load=load,
            limits=Limits(ttft_ms=ttft, tpot_ms=tpot),
        )
        _run(terminal, services, test, out)


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake .jsonl or Azure .csv file.")],
    url: UrlOption = None,
    length_divisor: Annotated[
        float,
        typer.Option(
            "--length-divisor", callback=divisor, help="Prompts and answers are that many times shorter."
        ),
    ] = 1.0,
    rate_divisor: Annotated[
        float,
        typer.Option("--rate-divisor", callback=divisor, help="Requests come that many times less often."),
    ] = 1.0,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, max=MOST_REQUESTS, help="The first so many only.")
    ] = None,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    vocab_size: VocabOption = 1000,
    timeout_s: TimeoutOption = 600.0,
    keys_file: KeysOption = None,
    out: OutOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """A production trace at its own times, scaled; equal prefixes in the trace are equal prefixes here."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        check_output(out, force=force)
        try:
            found = scaled(
                read_trace(trace, limit=requests), length_divisor=length_divisor, rate_divisor=rate_divisor
            )
        except TraceError as error:
            raise CommandFailed(str(error)) from error
        prompt, output = mean_lengths(found)
        per_s = mean_rate(found)
        load = {
            "arrivals": "trace",
            "trace": trace.name,
            "length_divisor": length_divisor,
            "rate_divisor": rate_divisor,
            "requests": len(found),
            "mean_prompt_tokens": round(prompt, 1),
            "mean_new_tokens": round(output, 1),
            "mean_rate": round(per_s, 4) if math.isfinite(per_s) else None,
        }

        def make(model: ServedModel) -> Iterable[Due]:
            return of_trace(found, vocab_size=vocab_size, longest=model.max_model_len)

        services = services_of(context)
        test = LoadTest(
            kind="replay",
            server=_server(services, url, keys_file, timeout_s),
            runs={trace.name: make},
            load=load,
            limits=Limits(ttft_ms=ttft, tpot_ms=tpot),
        )
        _run(terminal, services, test, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """What is sent, and what is asked of the answers."""

    kind: str  # of the report
    server: Server
    runs: Mapping[str, MakeLoad]  # by name, one after the other
    load: Mapping[str, Any]  # the same in words, for the report
    limits: Limits


def _run(terminal: Terminal, services: Services, test: LoadTest, out: Path | None) -> None:
    """Runs each load, prints its row, writes the report. Exit code 1 when nothing was answered."""
    rows: list[dict[str, Any]] = []
    samples: dict[str, Sequence[Outcome]] = {}
    config: dict[str, Any] = {"url": test.server.url, "timeout_s": test.server.timeout_s}
    with Phases(terminal) as phases:
        for name, make in test.runs.items():
            phases.start(f"{name}: sending")
            try:
                model, outcomes = services.run_load(test.server, make, phases.start)
            except ServerUnusable as error:
                raise CommandFailed(str(error)) from error
            config |= asdict(model)
            samples[name] = outcomes
            rows.append({"load": name, **summary(outcomes, test.limits)})
    report = Report(
        kind=test.kind,
        rows=rows,
        config=config,
        load={**test.load, "limits": asdict(test.limits)},
        samples={name: [asdict(outcome) for outcome in found] for name, found in samples.items()},
        ceilings={},
    ).content()
    if terminal.as_json:
        terminal.emit(**{name: value for name, value in report.items() if name != "samples"})
    else:
        bench_tables.print_load(terminal, rows, test.limits)
    if out is not None:  # after what was measured has been shown
        write_report(out, report)
        terminal.say(f"report in {out}")
    if failed := [outcome for found in samples.values() for outcome in found if not outcome.is_answered]:
        terminal.note(f"{counted(len(failed), 'request')} failed; the first: {failed[0].error}", event="note")
    if not any(row["answered"] for row in rows):
        raise typer.Exit(1)


def _for_any_model(load: Callable[[], Iterable[Due]]) -> MakeLoad:
    """A load that does not depend on the model."""

    def make(model: ServedModel) -> Iterable[Due]:
        return load()

    return make


def _server(services: Services, url: str | None, keys_file: str | None, timeout_s: float) -> Server:
    """As `tandem chat` finds it."""
    service = service_at(services, url, keys_file)
    return Server(url=service.url, headers=service.headers, timeout_s=timeout_s)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise UsageError(f"--rate {text!r}: give requests a second, above 0, with commas between several")
    if len({_rate_name(rate) for rate in rates}) < len(rates):
        raise UsageError(f"--rate {text!r}: give each rate once")
    return rates


def _rate_name(per_s: float) -> str:
    return f"{per_s:g}/s"
