"""Which device, number format and threads a rank gets."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workers.config import ParallelConfig
from workers.engine.step import GroupFailed
from workers.kernels import Quantization
from workers.kv_format import INT8
from workers.runtime.errors import RankConfigError

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_CGROUP = Path("/sys/fs/cgroup")
_log = logging.getLogger(__name__)


def choose_device(config: ParallelConfig, rank: int) -> torch.device:
    """`auto` is CUDA where there is one. A process that sees fewer devices than ranks was given its own."""
    if config.device not in ("auto", "cpu", "cuda"):
        raise RankConfigError(f"parallel.device {config.device!r}: must be auto, cpu or cuda")
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise RankConfigError("parallel.device is cuda, but torch sees no CUDA device")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", rank if torch.cuda.device_count() > rank else 0)


def make_current(device: torch.device) -> None:
    """Makes a GPU the current one of this thread, in which the rank then computes: Triton launches kernels on
    the current one, whatever their tensors are on. Rank 0 needs it in no thread: device 0 is any thread's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def ends_the_group(what: str) -> Iterator[None]:
    """Around what may fail without harm, but for a fault of the device itself, of which each later kernel
    would fail too: that one comes out as GroupFailed."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise GroupFailed(f"the device of rank 0 fails in {what}: {error}") from error


def choose_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise RankConfigError(f"model.dtype {name!r}: must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def choose_kv_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """Of keys and values in the pool."""
    if name not in ("auto", INT8):
        raise RankConfigError(f"cache.dtype {name!r}: must be auto or {INT8}")
    return torch.int8 if name == INT8 else model


def choose_quantization(name: str) -> Quantization:
    """The storage of linear weights. Raises RankConfigError naming the legal ones."""
    try:
        return Quantization(name)
    except ValueError:
        legal = ", ".join(each.value for each in Quantization)
        raise RankConfigError(f"model.quantization {name!r}: must be one of {legal}") from None


def set_threads(config: ParallelConfig, ranks_on_machine: int) -> None:
    """Sizes torch's pools: usable cores shared by the group's ranks on the machine, unless the config says.

    Groups that share a machine know nothing of each other: each takes all cores, so that one alone is fast.
    """
    torch.set_num_threads(config.threads_per_rank or max(1, usable_cores() // ranks_on_machine))
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:  # allowed once, before torch's first parallel work; it only saves idle threads
            _log.debug("inter-operator threads stay at %d", torch.get_num_interop_threads())


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: of its affinity, and no more than the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0))
    version_2, version_1 = cgroup / "cpu.max", cgroup / "cpu" / "cpu.cfs_quota_us"
    if version_2.exists():
        quota, period = version_2.read_text().split()
    elif version_1.exists():
        quota, period = version_1.read_text(), version_1.with_name("cpu.cfs_period_us").read_text()
    else:
        return cores
    is_limited = quota.strip() not in ("max", "-1")
    return max(1, min(cores, int(quota) // int(period))) if is_limited else cores
