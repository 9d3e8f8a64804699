"""`cluster.app:build`: the application builder that deployment files name.

Serve calls it in a task on the cluster with the file's `args`. What cannot work is refused here, so that it
shows as DEPLOY_FAILED with one sentence instead of a group that waits or restarts for ever.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.serve import Application

from cluster.config.parse import parse_config
from cluster.config.problems import ConfigError, Problem
from cluster.config.tree import EMBEDDED_MODEL, PoolConfig, TandemConfig
from cluster.deployment.named_files import key_problems, open_model, step_cost_problems
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU, StepCost
from cluster.models import embedded
from cluster.scaling.told import told_numbers
from router.deployment import Router, RouterStart
from workers.config import ModelConfig
from workers.group import FrontSettings, WorkerGroup
from workers.types import Role

_log = logging.getLogger(__name__)

_MAX_ONGOING = 10_000  # calls return at once: bounds are the router's admission and the engine's queue
_REQUEST_ROUTER = "router.request_router:RankedRequestRouter"
_HEALTH_PERIOD_S = 1.0  # three failed checks in a row and Serve replaces the group
_HEALTH_TIMEOUT_S = 10.0
_MAX_STARTS = 3  # of a group that does not come up; then the deployment has failed
_STOP_MARGIN_S = 20.0  # for ending ranks in order after the drain
_UPDATE_MARGIN_S = 30.0  # for Serve to make a loaded group public, and for its first token


def build(args: dict[str, Any]) -> Application:
    """The Serve application of a config tree. Raises ConfigError with every mistake."""
    config = parse_config(args)
    model = _located(config.model)
    checkpoint, misfits = open_model(config, Path(model.path))
    problems = [
        *misfits,
        *_relative_drafts(config),
        *key_problems(config),
        *step_cost_problems(config),
        *_resource_problems(config),
        *_network_problems(config),
        *_security_problems(config),
    ]
    if problems or checkpoint is None:
        raise ConfigError(problems)
    return assemble(config, model, checkpoint.model_hash(model.quantization))


def assemble(config: TandemConfig, model: ModelConfig, model_hash: str) -> Application:
    """A deployment of each pool, and the router with a handle of every one; `model` is where it is here."""
    pools = config.pools.by_name()
    longest_drain_s = max(pool.drain_timeout_s for pool in pools.values())
    start = RouterStart(
        http=replace(config.router.http, model_name=model.name),
        policy=config.router.placement_policy(),
        tokenizer_folder=model.path,
        model_hash=model_hash,
        update_timeout_s=max(pool.start_timeout_s for pool in pools.values()) + _UPDATE_MARGIN_S,
    )
    deployment = serve.deployment(
        name="router",
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        max_constructor_retry_count=_MAX_STARTS,
        # Groups end or hand over their requests in time; whoever answers through this router goes on then.
        graceful_shutdown_timeout_s=max(longest_drain_s, config.router.http.max_request_s) + _STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.2,
    )
    told = told_numbers(config.scaling, _step_cost(config))
    groups = {name: _pool(name, pool, model, config, told) for name, pool in pools.items()}
    return deployment(Router).bind(start, groups)


def _pool(
    name: str, pool: PoolConfig, model: ModelConfig, config: TandemConfig, told: Mapping[str, float]
) -> Application:
    """The deployment of a pool: a replica is the front of one group, in the group's placement group."""
    settings = FrontSettings(
        pool=name,
        role=Role(name),
        config=pool.group(model),
        on_loopback=config.network.interface == "loopback",
        start_timeout_s=pool.start_timeout_s,
        drain_timeout_s=pool.drain_timeout_s,
        scaling=told,
    )
    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=pool.bundles(),
        placement_group_strategy=pool.placement,
        request_router_config={"request_router_class": _REQUEST_ROUTER},
        max_constructor_retry_count=_MAX_STARTS,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=pool.drain_timeout_s + _STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return deployment(WorkerGroup).bind(settings)


def _step_cost(config: TandemConfig) -> StepCost:
    """What autoscaling reckons with. Raises StepCostError."""
    file = config.scaling.step_cost
    return SMOLLM2_ON_SMALL_CPU if file is None else StepCost.load(Path(file))


def _located(model: ModelConfig) -> ModelConfig:
    """The model with its folder and its served name. Raises ConfigError."""
    path = os.path.expanduser(model.path)
    try:
        if embedded.canonical_path(path) == EMBEDDED_MODEL:
            folder = embedded.ensure(_log.info)
        elif os.path.isabs(path):
            folder = embedded.model_folder(path)
        else:  # it would be taken from this process's working folder, which nobody chose
            raise embedded.EmbeddedModelError("is no absolute path; `tandem deploy` makes one of it")
    except embedded.EmbeddedModelError as error:
        hint = "a folder must be there, under this path, on every machine of the cluster"
        problem = Problem(path="model.path", message=str(error), got=repr(model.path), hint=hint)
        raise ConfigError([problem]) from error
    return replace(model, path=str(folder), name=model.name or folder.resolve().name)


def _relative_drafts(config: TandemConfig) -> Iterable[Problem]:
    """Folders of draft models that would be taken from this process's working folder."""
    for name, pool in config.pools.by_name().items():
        folder = pool.speculative.model
        if folder and not os.path.isabs(os.path.expanduser(folder)):
            yield Problem(
                path=f"pools.{name}.speculative.model",
                message="is no absolute path; `tandem deploy` makes one of it",
                got=repr(folder),
                hint="a folder must be there, under this path, on every machine of the cluster",
            )


def _resource_problems(config: TandemConfig) -> Iterable[Problem]:
    """Groups that the machines known now can never hold."""
    available = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray's
    for name, pool in config.pools.by_name().items():
        needed: dict[str, float] = {}
        for bundle in pool.bundles():
            for resource, amount in bundle.items():
                needed[resource] = needed.get(resource, 0.0) + amount
        short = {key: amount for key, amount in needed.items() if amount > available.get(key, 0.0)}
        if short and not pool.wait_for_resources:
            yield Problem(
                path=f"pools.{name}.tensor_parallel",
                message="a group needs more than the whole cluster has",
                got=", ".join(f"{amount:g} {key}" for key, amount in short.items()),
                allowed=", ".join(f"{available.get(key, 0.0):g} {key}" for key in short),
                hint=f"lower it or cpus_per_rank, add machines, or set pools.{name}.wait_for_resources: true",
            )


def _network_problems(config: TandemConfig) -> Iterable[Problem]:
    """Groups that nobody on another machine could reach."""
    num_machines = sum(bool(node["Alive"]) for node in ray.nodes())  # type: ignore[no-untyped-call]  # Ray's
    if config.network.interface == "loopback" and num_machines > 1:
        yield Problem(
            path="network.interface",
            message=f"ranks on 127.0.0.1 cannot be reached from the other machines of this cluster of "
            f"{num_machines}",
            got="'loopback'",
            allowed="node",
        )


def _security_problems(config: TandemConfig) -> Iterable[Problem]:
    """Serve opens ports on all interfaces that run what they are sent, unless Ray asks for a token."""
    if not is_token_auth_enabled() and not config.security.allow_ray_without_token:
        yield Problem(
            path="security.allow_ray_without_token",
            message="this Ray cluster takes commands from anyone who can reach its ports",
            hint="start it with RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes the token), "
            "or set this to true on a network where nobody else is",
        )
