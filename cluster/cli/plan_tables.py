"""How a plan looks at a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape

from cluster.cli.tables import table
from cluster.cli.terminal import Terminal
from cluster.figures.words import counted
from cluster.plan.demand import Demand
from cluster.plan.limits import DecodeRow
from cluster.plan.memory import row_formula
from cluster.plan.plan import Plan
from cluster.plan.proposal import Proposal

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal, for what, and what else was looked at."""

    demand: Demand
    proposal: Proposal
    lines: Sequence[str]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """As plain values; rates in tokens, bytes and operations a second."""
    spec, experts = plan.model.spec, plan.model.spec.experts
    return {
        "model": {
            "name": plan.model.name,
            "parameters": plan.model.num_parameters,
            "active_parameters": plan.model.active_parameters,
            "layers": spec.num_layers,
            "hidden": spec.hidden_size,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "experts": 0 if experts is None else experts.num_experts,
            "experts_per_token": 0 if experts is None else experts.num_per_token,
            "dtype": plan.shape.dtype,
            "kv_dtype": plan.shape.kv_dtype,
            "quantization": plan.shape.quantization,
        },
        "device": asdict(plan.device),
        "speed": {
            "source": plan.speed.source,
            "efficiency": plan.speed.efficiency,
            "step_cost": asdict(plan.speed.cost),
        },
        "tensor_parallel": plan.shape.tensor_parallel,
        "context": plan.shape.context,
        "memory": {
            "parts": [asdict(part) for part in plan.memory.parts],
            "kv_bytes_per_token": plan.memory.kv_bytes_per_token,
            "num_blocks": plan.memory.num_blocks,
            "block_size": plan.memory.block_size,
            "pool_tokens": plan.memory.num_tokens,
            "requests": plan.memory.num_requests,
            "cap": plan.memory.cap,
        },
        "ranks": [asdict(row) for row in plan.ranks],
        "decode": [asdict(row) for row in plan.decode],
        "prefill": [asdict(row) for row in plan.prefill],
        "turn": asdict(plan.turn),
        "notes": list(plan.notes),
    }


def proposal_facts(proposed: Proposed) -> dict[str, Any]:
    """As plain values."""
    proposal, demand = proposed.proposal, proposed.demand
    return {
        **asdict(proposal),
        "devices": proposal.devices,
        "ratio": proposal.ratio,
        "demand": {
            "rate": demand.rate,
            "mean_prompt": demand.mean_prompt,
            "mean_output": demand.mean_output,
            "source": demand.source,
            "refused_share": demand.refused_share,
        },
        "looked_at": list(proposed.lines),
    }


def print_plan(terminal: Terminal, plan: Plan) -> None:
    """Model, device, memory, ranks, decode, prefill, notes."""
    spec, device = plan.model.spec, plan.device
    terminal.say(
        f"{plan.model.name}: {plan.model.num_parameters / 1e9:.3g} B parameters, L {spec.num_layers}, "
        f"H {spec.hidden_size}, A {spec.num_heads}, K {spec.num_kv_heads}, D {spec.head_dim}, "
        f"F {spec.intermediate_size}, V {spec.vocab_size}",
        style="bold",
    )
    if (experts := spec.experts) is not None:
        terminal.say(
            f"  E {experts.num_experts} experts of F {experts.intermediate_size} in {len(experts.layers)} "
            f"layers, k {experts.num_per_token} of a layer for a token: it goes through "
            f"{plan.model.active_parameters / 1e9:.3g} B parameters"
        )
    ranks = plan.shape.tensor_parallel
    terminal.say(
        f"{ranks} x {device.name}: {device.memory_bytes / _GIB:.1f} GiB, "
        f"{device.read_bytes_per_s / 1e9:,.0f} GB/s, {device.flop_per_s / 1e12:.3g} Tflop/s, "
        f"balance {device.balance:.0f} flop/B"
    )
    terminal.say(f"  {plan.speed.source}")
    _memory(terminal, plan)
    _ranks(terminal, plan)
    _decode(terminal, plan)
    _prefill(terminal, plan)
    terminal.say()
    for note in plan.notes:
        terminal.say(f"- {note}")


def print_proposal(terminal: Terminal, proposed: Proposed, context: int) -> None:
    """The pools, and what else was looked at."""
    proposal, demand = proposed.proposal, proposed.demand
    terminal.say()
    terminal.say(
        f"For {demand.rate:.3g} requests a second, {demand.mean_prompt:,.0f} prompt and "
        f"{demand.mean_output:,.0f} new tokens in the mean ({demand.source}):",
        style="bold",
    )
    found = table("pool", "groups", "ranks", "decode batch", "busy")
    for pool in proposal.pools:
        found.add_row(
            pool.role,
            str(pool.groups),
            str(pool.tensor_parallel),
            f"{pool.batch:.1f}",
            f"{pool.busy * 100:.0f} %",
        )
    terminal.show(found)
    ratio = f", prefill : decode {proposal.ratio}" if proposal.ratio else ""
    devices = counted(proposal.devices, "device")
    terminal.say(
        f"{devices}{ratio}; TTFT of 90 % within {proposal.ttft_p90_s:.3g} s, "
        f"{proposal.tpot_s * 1e3:.3g} ms a token, longest gap {proposal.longest_gap_s * 1e3:.3g} ms"
    )
    for line in (*refused_lines(proposed.demand, context), *proposed.lines):
        terminal.say(f"- {line}")


def refused_lines(demand: Demand, context: int) -> list[str]:
    """What is not served, if anything."""
    if not demand.refused_share:
        return []
    return [
        f"{demand.refused_share:.1%} of the requests are longer than {context:,} tokens: they are refused, "
        "and not counted here"
    ]


def _memory(terminal: Terminal, plan: Plan) -> None:
    memory = plan.memory
    terminal.say()
    found = table("memory of a rank", "bytes", "GiB", "formula", prose="formula")
    for part in memory.parts:
        found.add_row(part.name, f"{part.num_bytes:,}", f"{part.num_bytes / _GIB:.2f}", escape(part.formula))
    terminal.show(found)
    spec = plan.model.spec
    terminal.say(
        f"KV cache: 2 x L {spec.num_layers} x K {spec.num_kv_heads} x "
        f"{row_formula(spec.head_dim, plan.shape.kv_dtype)} = {memory.kv_bytes_per_token:,} B a token, "
        f"{memory.kv_bytes_per_token * memory.context / 2**20:,.0f} MiB for {memory.context:,} tokens"
    )
    terminal.say(
        f"{counted(memory.num_requests, 'request')} of {memory.context:,} tokens "
        f"{'fits' if memory.num_requests == 1 else 'fit'} at once, "
        f"{memory.num_tokens:,} tokens in all"
    )
    if memory.cap:
        terminal.say(f"the pool is capped by {memory.cap}")
    if memory.num_requests > (running := plan.shape.schedule.max_running):
        terminal.say(f"at most {running:,} of them run at the same time (--max-running)")


def _ranks(terminal: Terminal, plan: Plan) -> None:
    terminal.say()
    found = table("tensor parallel", "weights of a rank", "KV tokens", "requests", "")
    for row in plan.ranks:
        fits = f"{row.weight_bytes / _GIB:.2f} GiB" if row.requests else "does not fit"
        found.add_row(
            str(row.tensor_parallel),
            fits,
            f"{row.pool_tokens:,}",
            f"{row.requests:,}",
            "capped" if row.is_capped else "",
        )
    terminal.show(found)


def _decode(terminal: Terminal, plan: Plan) -> None:
    terminal.say()
    found = table("decode batch", "limit tok/s", "expected", "each tok/s", "flop/B", "bound by", "")
    for row in plan.decode:
        found.add_row(
            f"{row.batch:,}",
            f"{row.limit_tokens_per_s:,.0f}",
            f"{row.expected_tokens_per_s:,.0f}",
            f"{row.expected_tokens_per_s / row.batch:,.1f}",
            f"{row.intensity:.1f}",
            row.bound,
            _beyond(row),
        )
    terminal.show(found)
    context = f"{plan.shape.context:,} tokens"
    at_context = f"never at {context} (keys and values take longer to read than to multiply)"
    if plan.turn.at_context is not None:
        at_context = f"from batch {plan.turn.at_context:.0f} at {context}"
    terminal.say(
        f"decode turns from bandwidth- to compute-bound {at_context}; from batch "
        f"{plan.turn.weights_alone:.0f} with short contexts"
    )


def _beyond(row: DecodeRow) -> str:
    if not row.fits:
        return "beyond the pool"
    return "" if row.runs else "beyond max_running"


def _prefill(terminal: Terminal, plan: Plan) -> None:
    terminal.say()
    found = table("prefill", "Tflop", "linear", "attention", "limit tok/s", "expected", "s", "bound by")
    for row in plan.prefill:
        found.add_row(
            f"{row.tokens:,}",
            _tera(row.linear_flop + row.attention_flop),
            _tera(row.linear_flop),
            _tera(row.attention_flop),
            f"{row.limit_tokens_per_s:,.0f}",
            f"{row.expected_tokens_per_s:,.0f}",
            f"{row.expected_s:.3g}",
            row.bound,
        )
    terminal.show(found)


def _tera(flop: float) -> str:
    tera = flop / 1e12
    return f"{tera:.1f}" if tera >= 1 else f"{tera:.3f}"
