"""A plan: everything that is known about a model on a device, put together from the other modules here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU, StepCost
from cluster.figures.words import counted
from cluster.plan import textbook
from cluster.plan.arithmetic import PLAIN, kv_bytes_per_token
from cluster.plan.calibration import SHIPPED_PARAMETERS, find_calibration, machine_roofs
from cluster.plan.demand import Demand, Targets
from cluster.plan.devices import THIS_MACHINE, Device, Roofs, find_device, in_float32, this_machine
from cluster.plan.limits import DecodeRow, PrefillRow, Turn, decode_rows, prefill_rows, turn_of
from cluster.plan.memory import DoesNotFit, MemoryPlan, Shape, plan_memory
from cluster.plan.models import PlannedModel
from cluster.plan.proposal import GroupLimits, NotReachable, Proposal, propose_apart, propose_unified
from cluster.plan.roofline import Load
from workers.kv_format import INT8
from workers.model.spec import legal_tensor_parallel

_MOST_RANKS = 8  # ranks of a group belong on one machine
_REDUCE_LATENCY_S = 10e-6  # of one all-reduce of a few rows
PREFILL_LENGTHS = (512, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What steps take on the device, and how it is known."""

    roofs: Roofs  # of one rank
    cost: StepCost  # of one rank
    source: str
    efficiency: float | None  # share of the datasheet's ceilings that is assumed; None where it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A number of ranks that the model can be split into."""

    tensor_parallel: int
    weight_bytes: int  # of a rank
    pool_tokens: int  # of the group; 0 where it does not fit
    requests: int  # of the full context
    is_capped: bool = False  # more memory would be left for the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `tandem plan` prints."""

    model: PlannedModel
    device: Device
    shape: Shape
    speed: Speed
    memory: MemoryPlan
    ranks: Sequence[RankRow]
    decode: Sequence[DecodeRow]
    prefill: Sequence[PrefillRow]
    turn: Turn
    notes: Sequence[str]


def find_speed(
    model: PlannedModel, device_name: str, shape: Shape, efficiency: float
) -> tuple[Device, Speed]:
    """The device and its speed with this model. Raises UnknownDevice, StepCostError."""
    load = load_of(model, shape)
    if device_name != THIS_MACHINE:
        device = find_device(device_name)
        if shape.dtype == "float32":
            device = in_float32(device)
        return device, Speed(
            roofs=device.roofs,
            cost=load.step_cost(device, efficiency=efficiency),
            source=device.source,
            efficiency=efficiency,
        )
    found = find_calibration(model.model_hash(shape.quantization), shape.dtype, shape.quantization)
    if found.is_measured or _is_shipped(model, shape):
        device = this_machine(found.roofs, source=found.source, gpu_memory_bytes=found.gpu_memory_bytes)
        return device, Speed(roofs=found.roofs, cost=found.cost, source=found.source, efficiency=None)
    roofs, source = machine_roofs(shape.dtype)
    device = this_machine(roofs, source=source)
    derived = load.step_cost(device, efficiency=efficiency)
    return device, Speed(
        roofs=roofs,
        cost=replace(derived, overhead_s=SMOLLM2_ON_SMALL_CPU.overhead_s),  # host work, of any model
        source=source,
        efficiency=efficiency,
    )


def _is_shipped(model: PlannedModel, shape: Shape) -> bool:
    """Whether the shipped step cost is of this model."""
    return (model.num_parameters, shape.dtype, shape.forms) == (SHIPPED_PARAMETERS, "bfloat16", PLAIN)


def make_plan(
    model: PlannedModel, device: Device, speed: Speed, shape: Shape, batches: Sequence[int]
) -> Plan:
    """Raises DoesNotFit for a model or context that the ranks of `shape` cannot hold."""
    memory = plan_memory(model, device, shape)
    load = load_of(model, shape)
    devices = shape.tensor_parallel if device.is_gpu else 1  # ranks on a CPU share the machine
    roofs = Roofs(
        read_bytes_per_s=speed.roofs.read_bytes_per_s * devices, flop_per_s=speed.roofs.flop_per_s * devices
    )
    cost = split_cost(model, device, speed, shape)
    lengths = sorted({min(length, shape.context) for length in (*PREFILL_LENGTHS, shape.context)})
    return Plan(
        model=model,
        device=device,
        shape=shape,
        speed=speed,
        memory=memory,
        ranks=rank_rows(model, device, shape),
        decode=decode_rows(
            load,
            roofs,
            cost,
            is_measured=speed.efficiency is None,
            context=shape.context,
            most=memory.num_requests,
            max_running=shape.schedule.max_running,
            batches=batches,
        ),
        prefill=prefill_rows(load, roofs, cost, lengths, step_tokens=shape.schedule.max_step_tokens),
        turn=turn_of(load, roofs, shape.context),
        notes=[*_notes(model, device, speed, shape), *textbook.notes(model, device, shape.context)],
    )


def smallest_ranks(model: PlannedModel, device: Device, shape: Shape) -> int:
    """The first legal number of ranks with room for a request. Raises DoesNotFit when none has."""
    for row in rank_rows(model, device, shape):
        if row.requests:
            return row.tensor_parallel
    plan_memory(model, device, replace(shape, tensor_parallel=1))
    raise DoesNotFit(f"{model.name} does not fit {device.name} with any legal number of ranks up to 8")


def rank_rows(model: PlannedModel, device: Device, shape: Shape) -> list[RankRow]:
    """Every legal number of ranks up to 8, and what it holds."""
    rows = []
    for size in legal_tensor_parallel(model.spec):
        if size > _MOST_RANKS:
            break
        try:
            memory = plan_memory(model, device, replace(shape, tensor_parallel=size))
        except DoesNotFit:
            rows.append(RankRow(tensor_parallel=size, weight_bytes=0, pool_tokens=0, requests=0))
            continue
        weights = next(part.num_bytes for part in memory.parts if part.name == "weights")
        rows.append(
            RankRow(
                tensor_parallel=size,
                weight_bytes=weights,
                pool_tokens=memory.num_tokens,
                requests=memory.num_requests,
                is_capped=bool(memory.cap),
            )
        )
    return rows


def propose(
    plan: Plan, demand: Demand, targets: Targets, tensor_parallel: int | None
) -> tuple[Proposal, list[str]]:
    """The proposal with the fewest devices, and a line about each that was looked at; of equals the simpler.

    tensor_parallel: None to choose, among those with which groups fill a machine of 8 devices; on this
    machine the plan's own, for that is what was measured.
    Raises NotReachable with all reasons.
    """
    sizes = [tensor_parallel or plan.shape.tensor_parallel]
    if tensor_parallel is None and plan.device.is_gpu:
        filling = [
            row.tensor_parallel
            for row in plan.ranks
            if row.requests and _MOST_RANKS % row.tensor_parallel == 0
        ]
        sizes = filling or sizes  # a model may fit three devices, and not be split over four
    found: list[Proposal] = []
    lines: list[str] = []
    for size in sizes:
        memory = plan_memory(plan.model, plan.device, replace(plan.shape, tensor_parallel=size))
        group = GroupLimits(
            cost=split_cost(plan.model, plan.device, plan.speed, replace(plan.shape, tensor_parallel=size)),
            tensor_parallel=size,
            devices=size if plan.device.is_gpu else 1,
            step_tokens=plan.shape.schedule.max_step_tokens,
            pool_tokens=memory.num_tokens,
            max_running=plan.shape.schedule.max_running,
        )
        ranks = f"{counted(size, 'rank')} a group"
        for name, make in (("one pool", propose_unified), ("prefill and decode apart", propose_apart)):
            try:
                proposal = make(demand, targets, group)
            except NotReachable as error:
                lines.append(f"{name}, {ranks}: {error}")
                continue
            found.append(proposal)
            groups = " + ".join(counted(pool.groups, f"{pool.role} group") for pool in proposal.pools)
            lines.append(
                f"{name}, {ranks}: {groups}, {counted(proposal.devices, 'device')}, TTFT p90 "
                f"{proposal.ttft_p90_s:.3g} s, TPOT {proposal.tpot_s * 1e3:.3g} ms, longest gap "
                f"{proposal.longest_gap_s * 1e3:.3g} ms"
            )
    if not found:
        raise NotReachable("\n".join(lines))
    return min(found, key=lambda proposal: (proposal.devices, len(proposal.pools))), lines


def load_of(model: PlannedModel, shape: Shape) -> Load:
    """The model as it is to run."""
    return Load.of(model.spec, dtype=shape.dtype, cache=shape.cache.dtype, forms=shape.forms)


def split_cost(model: PlannedModel, device: Device, speed: Speed, shape: Shape) -> StepCost:
    """Of a group: GPUs share everything but the overhead and add two all-reduces a layer (ring: each rank
    sends 2 (n - 1) / n of the rows). Ranks on a CPU share one machine: they cost what one does.
    """
    ranks, cost = shape.tensor_parallel, speed.cost
    if ranks == 1 or not device.is_gpu:
        return cost
    reduces = 2 * model.spec.num_layers
    row_bytes = model.spec.hidden_size * shape.element_bytes
    token_traffic_s = reduces * 2 * (ranks - 1) / ranks * row_bytes / device.link_bytes_per_s
    return StepCost(
        overhead_s=cost.overhead_s + reduces * _REDUCE_LATENCY_S,
        weights_s=cost.weights_s / ranks,
        token_s=cost.token_s / ranks + token_traffic_s,
        row_s=cost.row_s / ranks,
        context_token_s=cost.context_token_s / ranks,
        pair_s=cost.pair_s / ranks,
        blend=cost.blend,
    )


def _notes(model: PlannedModel, device: Device, speed: Speed, shape: Shape) -> list[str]:
    notes = []
    if device.name == THIS_MACHINE and not speed.source.startswith("measured"):
        notes.append("Steps of this model are not measured here: run `tandem bench calibrate MODEL` first.")
    if speed.efficiency is not None:
        notes.append(
            f"Expected rates assume {speed.efficiency:.0%} of these ceilings (--efficiency), "
            "limits all of them."
        )
    if shape.tensor_parallel > 1 and device.is_gpu:
        notes.append(
            f"Two all-reduces a layer are counted, each {_REDUCE_LATENCY_S * 1e6:g} us and its bytes over "
            f"{device.link_bytes_per_s / 1e9:g} GB/s; limits leave them out."
        )
    if shape.kv_dtype == INT8 and speed.source.startswith("measured"):
        notes.append(f"The steps were measured with keys and values in {shape.dtype}; int8 are read sooner.")
    if shape.kv_dtype != INT8:
        notes.append(
            f"Keys and values in 8 bits (--kv-dtype int8) would take "
            f"{kv_bytes_per_token(model.spec, dtype=INT8):,} B a token."
        )
    windows = [window for window in model.spec.sliding_window if window is not None]
    if windows and min(windows) < shape.context:
        beyond = "are kept for the layers without one"
        if model.spec.longest_window is not None:
            beyond = "go back while a request runs, which the number of requests does not count on"
        notes.append(f"A sliding window bounds what is read; blocks beyond it {beyond}.")
    return notes
