"""A deployment file for a proposal: the shipped one with other pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cluster.config.yaml_tree import read_yaml
from cluster.deployment.load import DEFAULT_FILE
from cluster.plan.devices import Device
from cluster.plan.memory import MemoryPlan, Shape
from cluster.plan.proposal import PoolProposal, Proposal

_GPUS_OF_A_MACHINE = 8
_ROUTER_GROUPS = 32  # that one router replica serves


def deployment_text(
    proposal: Proposal,
    *,
    model_path: str,
    device: Device,
    shape: Shape,
    memory: MemoryPlan,
    cores: int,
    notes: Sequence[str],
) -> str:
    """YAML that `tandem validate` accepts, `notes` above it. cores: of a machine, for groups without GPUs."""
    tree: Any = read_yaml(DEFAULT_FILE.read_text(encoding="utf-8")).value
    (application,) = tree["applications"]
    are_many = proposal.devices > (_GPUS_OF_A_MACHINE if device.is_gpu else 1)
    model: dict[str, Any] = {"path": model_path, "max_model_len": shape.context}
    if shape.dtype != "bfloat16":
        model["dtype"] = shape.dtype
    model["quantization"] = shape.quantization  # said even where it is none: a checkpoint may have its own
    application["args"] = {
        "model": model,
        "pools": {
            pool.role: _pool(pool, device, shape, memory, cores if are_many else None)
            for pool in proposal.pools
        },
        "router": {"policy": "prefix"},
        **({"network": {"interface": "node"}} if are_many else {}),
    }
    routers = -(-sum(pool.groups for pool in proposal.pools) // _ROUTER_GROUPS)
    application["deployments"] = [
        {"name": name, "num_replicas": count, "max_surge_percent": 100}
        for name, count in (("router", routers), *((pool.role, pool.groups) for pool in proposal.pools))
    ]
    head = "".join(f"# {_one_line(line)}\n" for line in notes)
    return head + yaml.safe_dump(tree, sort_keys=False, width=110)


def _one_line(text: str) -> str:
    """Names of files may hold anything; a comment ends with its line."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _pool(
    pool: PoolProposal, device: Device, shape: Shape, memory: MemoryPlan, cores: int | None
) -> Mapping[str, Any]:
    """cores: what a group takes, its ranks together, when it is to have a machine of its own."""
    cache: dict[str, Any] = {"block_size": memory.block_size}
    if shape.cache.dtype != "auto":
        cache["dtype"] = shape.cache.dtype
    if device.is_gpu:
        cache["memory_fraction"] = memory.cache.memory_fraction
    elif memory.cache.max_bytes != type(memory.cache)().max_bytes:
        cache["max_bytes"] = memory.cache.max_bytes
    found: dict[str, Any] = {
        "tensor_parallel": pool.tensor_parallel,
        "drain_timeout_s": 30,
        "cache": cache,
        "schedule": {
            "max_step_tokens": shape.schedule.max_step_tokens,
            "max_running": shape.schedule.max_running,
        },
    }
    if device.is_gpu:
        found["parallel"] = {"device": "cuda"}
    elif cores is not None:
        whole, rest = divmod(cores, pool.tensor_parallel)
        found["cpus_per_rank"] = cores / pool.tensor_parallel if rest else whole
    if pool.tensor_parallel > 1:  # its speed is that of ranks on one machine
        found["placement"] = "STRICT_PACK"
    return found
