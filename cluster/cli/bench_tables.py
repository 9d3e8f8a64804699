"""How the results of `tandem bench` look at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from cluster.bench.latency import Limits
from cluster.cli.tables import table
from cluster.cli.terminal import Terminal
from cluster.figures.words import counted

_MOST_BUSY = 1.5  # programs that wanted each core in the last minute, ours included
Printer = Callable[[Terminal, Mapping[str, Any]], None]


def print_calibration(terminal: Terminal, result: Mapping[str, Any], pool: Mapping[str, Any] | None) -> None:
    """Coefficients, how well they describe the steps, and rates that were not fitted."""
    about, cost = result["about"], result["cost"]
    terminal.say(f"{about['model']} in {about['dtype']} on {about['machine']}", style="bold")
    terminal.say(_ceilings(about))
    coefficients = table("coefficient", "value")
    for name, value in cost.items():
        coefficients.add_row(name, f"{value:g}" if name == "blend" else _seconds(value))
    terminal.show(coefficients)
    steps = table("prefill tokens", "pairs", "decode rows", "context", "measured ms", "residual")
    for sample in result["samples"]:
        steps.add_row(
            *(
                str(sample[name])
                for name in ("prefill_tokens", "prefill_pairs", "decode_rows", "context_tokens")
            ),
            f"{sample['seconds'] * 1e3:.2f}",
            _percent(sample["residual"]),
        )
    terminal.show(steps)
    checks = table("check", "batch", "measured tok/s", "predicted", "error")
    for row in result["checks"]:
        checks.add_row(
            row["kind"],
            str(row["batch"]),
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['predicted_tokens_per_s']:.1f}",
            _percent(row["error"]),
        )
    busy = about["measured_on"]["load_averages"][0] / about["measured_on"]["cores"]
    if pool is not None:
        checks.add_row(
            "KV blocks",
            "",
            str(pool["measured_blocks"]),
            str(pool["planned_blocks"]),
            _percent(pool["error"]),
        )
    terminal.show(checks)
    if busy > _MOST_BUSY:
        terminal.say(
            f"{busy:.1f} programs wanted each core: calibrate again when the machine is quiet",
            style="red",
        )


def print_sweep(terminal: Terminal, content: Mapping[str, Any]) -> None:
    """A line for each batch size."""
    load = content["load"]
    terminal.say(f"prompts of {load['prompt_tokens']:,}, {load['new_tokens']:,} new tokens", style="bold")
    terminal.say(_ceilings(content["ceilings"]))
    found = table(
        *("batch", "latency s", "TTFT ms", "p99", "TPOT ms", "tok/s", "decode tok/s", "limit"),
        *("prefill tok/s", "KV", "bandwidth", "compute", "bound by", ""),
    )
    for row in content["rows"]:
        found.add_row(
            str(row["batch"]),
            f"{row['latency_s']:.2f}",
            f"{row['ttft_ms']:.0f}",
            f"{row['ttft_p99_ms']:.0f}",
            f"{row['tpot_ms']:.1f}",
            f"{row['throughput_tokens_per_s']:.0f}",
            f"{row['decode_tokens_per_s']:.0f}",
            f"{row['decode_limit_tokens_per_s']:.0f}",
            f"{row['prefill_tokens_per_s']:.0f}",
            _share(row["kv_use"]),
            _share(row["read_share"]),
            _share(row["flop_share"]),
            row["bound"],
            "knee" if row["is_knee"] else "",
        )
    terminal.show(found)
    for row in content["rows"]:
        if row["limit_share"] > 1.0:
            terminal.say(
                f"batch {row['batch']} is above its limit: the ceilings were measured in a worse moment; "
                "run again on a quiet machine",
                style="red",
            )


def print_kv_cache(terminal: Terminal, content: Mapping[str, Any]) -> None:
    """A line for each output length."""
    load = content["load"]
    terminal.say(f"one prompt of {counted(load['prompt_tokens'], 'token')}", style="bold")
    found = table("new tokens", "with s", "without s", "times slower", "passes with", "passes without")
    for row in content["rows"]:
        found.add_row(
            str(row["new_tokens"]),
            f"{row['with_cache_s']:.3f}",
            f"{row['without_cache_s']:.3f}",
            f"{row['times_slower']:.1f}",
            f"{row['passes_with']:,}",
            f"{row['passes_without']:,}",
        )
    terminal.show(found)
    terminal.say(
        f"time grows with the power {load['growth_with']} of the tokens with the cache, "
        f"{load['growth_without']} without"
    )


def print_load(terminal: Terminal, rows: Sequence[Mapping[str, Any]], limits: Limits) -> None:
    """A line for each load, and the spread of its times."""
    found = table("load", "answered", "failed", "answered/s", "good/s", "good", "tok/s", "cached")
    for row in rows:
        found.add_row(
            escape(row["load"]),
            str(row["answered"]),
            str(row["failed"]),
            f"{row['answered_per_s']:.2f}",
            f"{row['good_per_s']:.2f}",
            _share(row["good_share"]),
            f"{row['output_tokens_per_s']:.0f}",
            _share(row["cached_share"]),
        )
    terminal.show(found)
    times = table("load", "milliseconds", "mean", "p50", "p90", "p99", "max")
    for row in rows:
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms", "send_delay_ms"):
            spread = row[name]
            if spread is not None:
                label = name.removesuffix("_ms").replace("_", " ")
                times.add_row(escape(row["load"]), label, *(f"{value:.1f}" for value in spread.values()))
    terminal.show(times)
    asked = [
        f"{name} {limit:g} ms"
        for name, limit in (("TTFT", limits.ttft_ms), ("TPOT", limits.tpot_ms))
        if limit is not None
    ]
    terminal.say("good: answered" + (", within " + " and ".join(asked) if asked else ""))


def _ceilings(found: Mapping[str, Any]) -> str:
    read, flop = found["read_bytes_per_s"] / 1e9, found["flop_per_s"] / 1e9
    floats = found.get("float32_flop_per_s")
    in_float32 = "" if floats is None else f", in float32 {floats / 1e9:,.0f}"
    return f"ceilings: reading {read:.1f} GB/s, products {flop:,.0f} Gflop/s{in_float32}"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _percent(value: float) -> str:
    return f"{value * 100:+.1f} %"


def _share(value: float) -> str:
    return f"{value * 100:.0f} %"
