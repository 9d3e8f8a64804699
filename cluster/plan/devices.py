"""What a device can hold, read and multiply: datasheet figures, and this machine as it was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from workers.host_memory import available_host_bytes

MIB = 1 << 20
THIS_MACHINE = "this"
# Of a GPU, for driver and libraries: a CUDA context with cuBLAS takes 300 to 500 MiB.
GPU_RESERVE_BYTES = 512 * MIB
# And for what torch's allocator holds beside live tensors.
GPU_ALLOCATOR_BYTES = 512 * MIB


# Of a GPU's bfloat16 products a second, those in float32: the engine makes each of three in TF32, which
# matrix units compute at half the rate.
FLOAT32_SHARE = 1 / (2 * 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """What a machine can do at best in one number format."""

    read_bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Ceilings of one device. Rates are of dense bfloat16 products, without structured sparsity; see also
    `in_float32`."""

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    flop_per_s: float
    link_bytes_per_s: float  # to another device of the machine, one way
    source: str
    is_gpu: bool = True
    reserve_bytes: int = GPU_RESERVE_BYTES
    allocator_bytes: int = GPU_ALLOCATOR_BYTES

    @property
    def roofs(self) -> Roofs:
        return Roofs(read_bytes_per_s=self.read_bytes_per_s, flop_per_s=self.flop_per_s)

    @property
    def balance(self) -> float:
        """Operations a byte at which products and reading take equally long."""
        return self.flop_per_s / self.read_bytes_per_s


# Datasheets call GiB of memory GB.
_GPUS = (
    Device(
        name="a100-40g",
        memory_bytes=40_960 * MIB,
        read_bytes_per_s=1.555e12,
        flop_per_s=312e12,
        link_bytes_per_s=300e9,
        source="NVIDIA A100 datasheet, 40 GB: 1,555 GB/s, BF16 312 TFLOPS; NVLink 600 GB/s both ways",
    ),
    Device(
        name="a100-80g",
        memory_bytes=81_920 * MIB,
        read_bytes_per_s=2.0e12,
        flop_per_s=312e12,
        link_bytes_per_s=300e9,
        source="NVIDIA A100 datasheet, 80 GB: 1,935 (PCIe), 2,039 GB/s (SXM), 2 TB/s taken; BF16 312 "
        "TFLOPS; NVLink 600 GB/s both ways",
    ),
    Device(
        name="h100",
        memory_bytes=81_920 * MIB,
        read_bytes_per_s=3.35e12,
        flop_per_s=989.4e12,
        link_bytes_per_s=450e9,
        source="NVIDIA H100 datasheet, SXM: 3.35 TB/s, BF16 1,979 TFLOPS with sparsity, half without; "
        "NVLink 900 GB/s both ways",
    ),
    Device(
        name="h200",
        memory_bytes=144_384 * MIB,
        read_bytes_per_s=4.8e12,
        flop_per_s=989.4e12,
        link_bytes_per_s=450e9,
        source="NVIDIA H200 datasheet, SXM: 141 GB, 4.8 TB/s, BF16 1,979 TFLOPS with sparsity, half "
        "without; NVLink 900 GB/s both ways",
    ),
    Device(
        name="l4",
        memory_bytes=24_576 * MIB,
        read_bytes_per_s=300e9,
        flop_per_s=121e12,
        link_bytes_per_s=32e9,
        source="NVIDIA L4 datasheet: 24 GB, 300 GB/s, BF16 242 TFLOPS with sparsity, half without; "
        "PCIe 64 GB/s both ways",
    ),
    Device(
        name="l40s",
        memory_bytes=49_152 * MIB,
        read_bytes_per_s=864e9,
        flop_per_s=362.05e12,
        link_bytes_per_s=32e9,
        source="NVIDIA L40S datasheet: 48 GB, 864 GB/s, BF16 362.05 TFLOPS; PCIe 64 GB/s both ways",
    ),
    Device(
        name="mi300x",
        memory_bytes=196_608 * MIB,
        read_bytes_per_s=5.3e12,
        flop_per_s=1307.4e12,
        link_bytes_per_s=448e9,
        source="AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, BF16 1,307.4 TFLOPS; Infinity "
        "Fabric 896 GB/s both ways",
    ),
)
DEVICES = {device.name: device for device in _GPUS}


class UnknownDevice(ValueError):
    """No such device. The text lists those there are."""


def find_device(name: str) -> Device:
    """A device of the table, for any name but `this`."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise UnknownDevice(f"no device {name!r}: there are {', '.join(device_names())}")
    return found


def in_float32(device: Device) -> Device:
    """The same GPU with the ceiling of its float32 products."""
    flop_per_s = device.flop_per_s * FLOAT32_SHARE
    source = f"{device.source}; float32 as three products in TF32, {flop_per_s / 1e12:.1f} TFLOPS"
    return replace(device, flop_per_s=flop_per_s, source=source)


def device_names() -> Iterable[str]:
    return (*DEVICES, THIS_MACHINE)


def this_machine(roofs: Roofs, *, source: str, gpu_memory_bytes: int = 0) -> Device:
    """This machine: the GPU that it was measured on, or its CPU with the memory that is free now."""
    is_gpu = gpu_memory_bytes > 0
    return Device(
        name=THIS_MACHINE,
        memory_bytes=gpu_memory_bytes or available_host_bytes(),
        read_bytes_per_s=roofs.read_bytes_per_s,
        flop_per_s=roofs.flop_per_s,
        # Ranks on a CPU hand over in memory. Of GPUs nothing is known: the slowest usual way.
        link_bytes_per_s=32e9 if is_gpu else roofs.read_bytes_per_s,
        source=source,
        is_gpu=is_gpu,
        reserve_bytes=GPU_RESERVE_BYTES if is_gpu else 0,
        allocator_bytes=GPU_ALLOCATOR_BYTES if is_gpu else 0,
    )
