"""Which pools of worker groups may stand together, and with which Serve deployments.

unified             every group answers, from the prompt to the last token
prefill + decode    decode groups answer; what they lack of a prompt's KV blocks they read from prefill
                    groups, or compute themselves when that is sooner
all three           requests go to unified and decode groups; decode alone is the same as unified
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cluster.config.problems import Problem
from cluster.config.tree import PoolConfig, TandemConfig

_LEAST_SHARE = 0.0001  # of a CPU or GPU: Ray counts in these
_REPLICAS = "how many groups it has is num_replicas of the deployment of that name"


def pool_problems(config: TandemConfig) -> Iterable[Problem]:
    """Pools that cannot work together: groups name blocks by hashes of whole blocks, so all must cut prompts
    alike, and find blocks by their hashes at all."""
    pools = config.pools.by_name()
    if "prefill" in pools and "decode" not in pools:
        yield Problem(
            path="pools.prefill",
            message="a prefill pool without a decode pool: it only computes prompts, nobody would answer",
            hint="add pools.decode, or call the pool unified",
        )
    first = next(iter(pools.items()), None)  # none of a file with a pool that is null
    for name, pool in pools.items():
        if first is not None and name != first[0]:
            yield from _misfits(*first, name, pool)
    if "prefill" in pools:
        for name, pool in pools.items():
            yield from _prefill_needs(name, pool)
    for name, pool in pools.items():
        if max(pool.cpus_per_rank, pool.num_gpus_per_rank()) < _LEAST_SHARE:
            yield Problem(
                path=f"pools.{name}.cpus_per_rank",
                message="Ray sets nothing aside for a rank, and makes no place for it then",
                got=f"{pool.cpus_per_rank:g}",
                allowed=f"at least {_LEAST_SHARE:g}, or gpus_per_rank above 0",
            )
    if pools:
        yield from _impatient(pools)


def _impatient(pools: Mapping[str, PoolConfig]) -> Iterable[Problem]:
    """Times after which one side gives the other up, although it has had no chance to be heard twice."""
    slowest = max(pools, key=lambda name: pools[name].transfer.heartbeat_s)
    least_s = 2 * pools[slowest].transfer.heartbeat_s
    for name, pool in pools.items():
        for key, value in (("lease_s", pool.transfer.lease_s), ("stall_s", pool.transfer.stall_s)):
            if value < least_s:
                yield Problem(
                    path=f"pools.{name}.transfer.{key}",
                    message="shorter than two heartbeats of the other side",
                    got=f"{value:g}",
                    allowed=f"at least {least_s:g}",
                    hint=f"pools.{slowest}.transfer.heartbeat_s is {least_s / 2:g}",
                )


def _prefill_needs(name: str, pool: PoolConfig) -> Iterable[Problem]:
    """What keeps a pool from reading the blocks of others, which it is there for beside a prefill pool."""
    for key, is_on, message in (
        ("cache.prefix_reuse", pool.cache.prefix_reuse, "groups find each other's blocks by prefix reuse"),
        ("transfer.enabled", pool.transfer.enabled, "decode groups read the blocks of prefill groups"),
    ):
        if not is_on:
            hint = "or leave out the prefill pool"
            yield Problem(path=f"pools.{name}.{key}", message=message, got="false", allowed="true", hint=hint)


def _misfits(name: str, pool: PoolConfig, other_name: str, other: PoolConfig) -> Iterable[Problem]:
    size, other_size = pool.cache.block_size, other.cache.block_size
    if size != other_size:
        yield Problem(
            path=f"pools.{other_name}.cache.block_size",
            message=f"groups cannot read each other's blocks: pools.{name}.cache.block_size is {size}",
            got=str(other_size),
            allowed=str(size),
            hint="give both the same",
        )
    if pool.cache.dtype != other.cache.dtype:
        yield Problem(
            path=f"pools.{other_name}.cache.dtype",
            message=f"groups cannot read each other's blocks: pools.{name}.cache.dtype is {pool.cache.dtype}",
            got=other.cache.dtype,
            allowed=pool.cache.dtype,
            hint="give both the same",
        )
    transports = pool.transfer.transport, other.transfer.transport
    if "auto" not in transports and transports[0] != transports[1]:
        yield Problem(
            path=f"pools.{other_name}.transfer.transport",
            message=f"groups have no way to each other: pools.{name}.transfer.transport is {transports[0]}",
            got=transports[1],
            allowed=f"{transports[0]}, auto",
        )


def deployment_problems(config: TandemConfig, deployments: Sequence[Any]) -> Iterable[Problem]:
    """Pools of which the file names no deployment. The only pool may do without: it has one group then."""
    named = [entry.get("name") for entry in deployments if isinstance(entry, Mapping)]
    pools = config.pools.by_name()
    for name in pools:
        if len(pools) > 1 and name not in named:
            yield Problem(
                path=f"pools.{name}",
                message="a pool without an entry in deployments",
                hint=f"add {{name: {name}, num_replicas: 1}} there; {_REPLICAS}",
            )
