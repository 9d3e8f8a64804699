"""Calibrations of this machine in the user's cache, one for each model, number format and kind of machine.

    ~/.cache/tandem/calibrations/MACHINE-FORM-MODELHASH.json     as `StepCost.save` writes it

FORM is the dtype, and with quantized weights both: bfloat16-int8.

Whoever has no calibration gets the shipped one, and is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.figures.machine import machine_key
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU, StepCost, StepCostError, load_with_facts
from cluster.plan.devices import Roofs

_HASH_DIGITS = 16
_MOST_PER_S, _MOST_BYTES = 1e21, 1 << 60  # far above any machine: beyond, the file is damaged
# Ceilings of the machine that the shipped figures are from: products in bfloat16, and in float32.
_SHIPPED_READ, _SHIPPED_FLOP, _SHIPPED_FLOAT32_FLOP = 34e9, 424e9, 210e9  # the last: twice one thread
SHIPPED_PARAMETERS = 134_515_008  # of the model that the shipped figures are of
SHIPPED = "shipped figures of SmolLM2-135M on two cores of an AMD EPYC (Zen 4): not measured here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A machine as the engine meets it."""

    cost: StepCost
    roofs: Roofs
    source: str  # for people: where the figures are from
    is_measured: bool  # here, with this model
    gpu_memory_bytes: int = 0  # of the device it was measured on; 0: the CPU


SHIPPED_CALIBRATION = Calibration(
    cost=SMOLLM2_ON_SMALL_CPU,
    roofs=Roofs(read_bytes_per_s=_SHIPPED_READ, flop_per_s=_SHIPPED_FLOP),
    source=SHIPPED,
    is_measured=False,
)


def default_root() -> Path:
    """Where calibrations are kept."""
    return Path.home() / ".cache" / "tandem" / "calibrations"


def calibration_file(
    model_hash: str, dtype: str, quantization: str, root: Path | None = None, *, tensor_parallel: int = 1
) -> Path:
    """Of this machine. The hash tells quantized weights apart, but not the dtype that they compute in. Plans
    go by those of one rank."""
    form = dtype if quantization == "none" else f"{dtype}-{quantization}"
    if tensor_parallel > 1:
        form = f"{form}-{tensor_parallel}-ranks"
    return (root or default_root()) / f"{machine_key()}-{form}-{model_hash[:_HASH_DIGITS]}.json"


def find_calibration(
    model_hash: str | None, dtype: str, quantization: str, root: Path | None = None
) -> Calibration:
    """The one for this model here, or the shipped one. Raises StepCostError for a damaged file."""
    if model_hash is None:
        return SHIPPED_CALIBRATION
    file = calibration_file(model_hash, dtype, quantization, root)
    return read_calibration(file, dtype) if file.exists() else SHIPPED_CALIBRATION


def read_calibration(file: Path, dtype: str) -> Calibration:
    """With the ceiling of products in this dtype. Raises StepCostError, naming the file."""
    cost, about = load_with_facts(file)
    memory = about.get("gpu_memory_bytes")
    product = "float32_flop_per_s" if dtype == "float32" else "flop_per_s"
    rates = [about.get(name) for name in ("read_bytes_per_s", product)]
    read, flop = (
        rate if isinstance(rate, int | float) and 1 < rate <= _MOST_PER_S else None for rate in rates
    )
    if read is None or flop is None:
        raise StepCostError(f"{file}: the measured ceilings of {dtype} are missing: calibrate again")
    return Calibration(
        cost=cost,
        roofs=Roofs(read_bytes_per_s=float(read), flop_per_s=float(flop)),
        source=f"measured on this machine ({about.get('machine')}), {file}",
        is_measured=True,
        gpu_memory_bytes=memory if isinstance(memory, int) and 0 < memory <= _MOST_BYTES else 0,
    )


def machine_roofs(dtype: str, root: Path | None = None) -> tuple[Roofs, str]:
    """This machine's ceilings in a dtype, from the newest calibration with any model, else the shipped ones;
    and which.

    Raises StepCostError for a damaged file.
    """
    folder = root or default_root()
    files = sorted(folder.glob(f"{machine_key()}-*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        flop = _SHIPPED_FLOAT32_FLOP if dtype == "float32" else _SHIPPED_FLOP
        roofs = Roofs(read_bytes_per_s=_SHIPPED_READ, flop_per_s=flop)
        return roofs, "ceilings of two cores of an AMD EPYC (Zen 4): not measured here"
    return read_calibration(files[-1], dtype).roofs, f"ceilings measured on this machine, {files[-1]}"


def keep_calibration(result: Mapping[str, object], root: Path | None = None) -> Path:
    """Writes what `cluster.bench.calibrate` found; gives the file. Raises StepCostError and OSError."""
    about = result["about"]
    assert isinstance(about, Mapping), type(about)
    file = calibration_file(
        str(about["model_hash"]),
        str(about["dtype"]),
        str(about["quantization"]),
        root,
        tensor_parallel=int(about["tensor_parallel"]),
    )
    facts = {**about, **{name: result[name] for name in ("samples", "checks", "pool")}}
    StepCost.of(result["cost"]).save(file, about=facts)
    return file
