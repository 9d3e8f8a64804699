"""Which device, number format and threads a rank gets."""

from __future__ import annotations

import logging
import os

import torch

from workers.config import ParallelConfig
from workers.runtime.errors import RankConfigError

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_LOG = logging.getLogger(__name__)


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


def choose_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise RankConfigError(f"model.dtype {name!r}: must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def set_threads(config: ParallelConfig, ranks_on_machine: int) -> None:
    """Sizes torch's pools: cores of the machine shared by its ranks, unless the config says."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.threads_per_rank or max(1, cores // ranks_on_machine))
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except (
            RuntimeError
        ):  # torch allows it once, before its first parallel work; it only saves idle threads
            _LOG.debug("inter-operator threads stay at %d", torch.get_num_interop_threads())
