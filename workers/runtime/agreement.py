"""What all ranks of a group must have in common before they compute, and how they settle on the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import torch

import workers
from workers.engine.step import GroupFailed
from workers.kernels import Quantization
from workers.runtime.handshake import Facts

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = "/proc/self/ns/pid"  # names the namespace in which this process's id means something
_FILES = "files"
_MACHINE = "machine"
_DEVICE = "device"
_COLLECTIVES = "collectives"
_NUM_BLOCKS = "num_blocks"
_SHARES_ATTENTION = "shares_attention"
PROBLEM = "problem"  # of a rank, or of the first that has one; empty: none

Decide = Callable[[dict[int, Facts]], Facts]
# Own facts and how rank 0 decides, which the other ranks leave to it. Raises GroupFailed or LeaderLost.
Agree = Callable[[Facts, Decide], Facts]


def first_problem(by_rank: dict[int, Facts]) -> Facts:
    """Rank 0's facts, with the problem of the first rank that has one."""
    for rank, facts in by_rank.items():
        if facts[PROBLEM]:
            return {PROBLEM: f"rank {rank}: {facts[PROBLEM]}"}
    return by_rank[0]


def code_digest() -> str:
    """Digest of the source of this package: equal on two machines exactly when they run the same engine."""
    digest = blake2b(digest_size=8)
    root = Path(workers.__file__).parent
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def file_facts(files: Sequence[Path]) -> Facts:
    """Which files these are: equal for ranks that see the very same ones, unchanged. Raises OSError."""
    digest = blake2b(machine_id().encode(), digest_size=16)
    for file in files:
        status = file.stat()
        parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(" ".join(map(str, parts)).encode() + b"\n")
    return {_FILES: digest.hexdigest()}


def agree_on_files(by_rank: dict[int, Facts]) -> Facts:
    """Whether all ranks see the very same files: then nobody has to read them for their content's digest."""
    return {_FILES: int(len({facts.get(_FILES) for facts in by_rank.values()}) == 1)}


def are_same_files(agreed: Facts) -> bool:
    """Of the answer of `agree_on_files`."""
    return bool(agreed[_FILES])


def identity_facts(
    *,
    content_hash: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    quantization: Quantization,
    block_size: int,
    tensor_parallel: int,
    max_model_len: int,
    device: torch.device,
) -> Facts:
    """What must be equal on all ranks, and machine and device, which need not."""
    return {
        "code": code_digest(),
        "torch": torch.__version__,
        "checkpoint": content_hash,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "quantization": quantization.value,
        "block_size": block_size,
        "tensor_parallel": tensor_parallel,
        "max_model_len": max_model_len,
        _MACHINE: machine_id(),
        _DEVICE: device_id(device),
    }


def machine_id() -> str:
    """Equal for processes of one kernel that know each other by process id, and so can share memory.

    Containers of one host are machines of their own here: neither their memory nor, as a rule, their cores
    are each other's.
    """
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PROCESS_IDS)}"


def device_id(device: torch.device) -> str:
    """Equal for ranks that compute on the same GPU, or both on CPUs."""
    if device.type == "cpu":
        return "cpu"
    return f"cuda {torch.cuda.get_device_properties(device).uuid}"


def agree_on_identity(by_rank: dict[int, Facts]) -> Facts:
    """Number of ranks on each machine and each GPU, and how they reach each other. Raises GroupFailed naming
    the ranks and values that differ."""
    differences = []
    for name in by_rank[0]:
        values = {rank: facts.get(name) for rank, facts in by_rank.items()}
        if name not in (_MACHINE, _DEVICE) and len(set(values.values())) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            differences.append(f"{name} ({listed})")
    if differences:
        raise GroupFailed("the ranks of this group differ in " + "; ".join(differences))
    machines = [str(facts[_MACHINE]) for facts in by_rank.values()]
    devices = [str(facts[_DEVICE]) for facts in by_rank.values()]
    kinds = {device.partition(" ")[0] for device in devices}
    if len(kinds) > 1:
        listed = ", ".join(f"rank {rank}: {device}" for rank, device in zip(by_rank, devices, strict=True))
        raise GroupFailed(f"the ranks of this group compute on different kinds of devices ({listed})")
    # NCCL has one rank a GPU.
    has_own_gpus = kinds == {"cuda"} and len(set(devices)) == len(devices)
    counts: dict[str, str | int] = {machine: machines.count(machine) for machine in machines}
    counts |= {device: devices.count(device) for device in devices if device != "cpu"}
    return counts | {_COLLECTIVES: "nccl" if has_own_gpus else "gloo"}


def num_ranks_here(agreed: Facts) -> int:
    """Of the answer of `agree_on_identity`: ranks on this machine."""
    return int(agreed[machine_id()])


def num_sharers(agreed: Facts, device: torch.device) -> int:
    """Of the answer of `agree_on_identity`: ranks whose pools take from the same memory as this one's."""
    return num_ranks_here(agreed) if device.type == "cpu" else int(agreed[device_id(device)])


def collectives_of(agreed: Facts) -> str:
    """Of the answer of `agree_on_identity`: the backend of torch.distributed."""
    return str(agreed[_COLLECTIVES])


def memory_facts(num_blocks: int, *, shares_attention: bool) -> Facts:
    return {_NUM_BLOCKS: num_blocks, _SHARES_ATTENTION: int(shares_attention)}


def agree_on_memory(by_rank: dict[int, Facts]) -> Facts:
    """The smallest pool of all: a block has the same number on every rank. And whether all can share."""
    return memory_facts(
        min(num_blocks_of(facts) for facts in by_rank.values()),
        shares_attention=all(shares_attention(facts) for facts in by_rank.values()),
    )


def num_blocks_of(agreed: Facts) -> int:
    return int(agreed[_NUM_BLOCKS])


def shares_attention(agreed: Facts) -> bool:
    return bool(agreed[_SHARES_ATTENTION])
