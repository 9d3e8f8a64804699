"""Other pools in place of those that answer, without a pause: the deployment that comes in between.

    unified                     what runs: its groups answer
    unified + prefill + decode  in between: the old groups answer until the new ones do
    prefill + decode            as the file says

Serve ends the groups of a pool that a config does not name any more as it starts those of a new one; nobody
would answer until these have loaded. It starts all groups anew for every change of `args`, so those of the
new pools are started twice in this way, and the old ones once more in the first step. That step wants room
for the old groups, the extra ones of `max_surge_percent` that replace them, and the new ones, all at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.config.parse import check_config
from cluster.config.problems import ConfigError
from cluster.deployment.load import Deployment, check_model

_ANSWERING = ("unified", "decode")  # pools; a prefill group only computes prompts for others


class CannotStandTogether(RuntimeError):
    """Old and new pools cannot be there at the same time, or not without a pause; the message says why."""


def deployment_in_between(deployment: Deployment, details: Mapping[str, Any]) -> Deployment | None:
    """What Serve is to have first: the deployment together with the pool that answers now, whose groups stay
    as many as they are. `details` are those of `ServeApi`.

    None when none is needed: no pool answers now, or one that the deployment has too. Raises
    CannotStandTogether when groups that answer would be ended before others are there in their place, of the
    old pool in the first step or of a new one in the second; and when the pools do not fit together, or
    not with the model.
    """
    running = details.get("applications", {}).get(deployment.application, {})
    answering = [name for name in _ANSWERING if _has_started(running.get("deployments", {}).get(name, {}))]
    if not answering or any(name in deployment.config.pools.by_name() for name in answering):
        return None
    (old,) = answering  # of two one would be in the deployment
    sent = running.get("deployed_app_config") or {}
    entry = _entry_of(sent, old)
    if not entry.get("max_surge_percent"):
        raise CannotStandTogether(f"{old}, which runs, has no max_surge_percent")
    app = deployment.tree["applications"][deployment.index]
    for name in _ANSWERING:
        if name in deployment.config.pools.by_name() and not _stays_up(deployment, name):
            raise CannotStandTogether(f"{name} has neither max_surge_percent nor a second group")
    old_pools = (sent.get("args") or {}).get("pools") or {}
    new_pools = app["args"].get("pools") or {"unified": {}}
    args = {**app["args"], "pools": {**new_pools, old: old_pools.get(old) or {}}}
    config, problems = check_config(args)
    if config is None:
        raise CannotStandTogether(problems[0].render())
    kept = {key: value for key, value in entry.items() if key != "autoscaling_config"}
    number = max(running["deployments"][old]["target_num_replicas"], 1)
    entries = [*(app.get("deployments") or ()), {**kept, "num_replicas": number}]
    applications = list(deployment.tree["applications"])
    applications[deployment.index] = {**app, "args": args, "deployments": entries}
    tree = {**deployment.tree, "applications": applications}
    between = replace(deployment, tree=tree, config=config)
    try:
        check_model(between)
    except ConfigError as error:
        raise CannotStandTogether(error.problems[0].render()) from error
    return between


def _entry_of(app: Mapping[str, Any], pool: str) -> Mapping[str, Any]:
    """What an application's config says of a pool for Serve."""
    entries: Mapping[str, Mapping[str, Any]] = {
        entry["name"]: entry for entry in app.get("deployments") or ()
    }
    return entries.get(pool, {})


def _stays_up(deployment: Deployment, pool: str) -> bool:
    """Whether one of its groups answers while Serve starts all anew. Without a surge it ends one first."""
    entry = _entry_of(deployment.tree["applications"][deployment.index], pool)
    return bool(entry.get("max_surge_percent")) or deployment.num_replicas.get(pool, 1) > 1


def _has_started(deployment: Mapping[str, Any]) -> bool:
    """Whether a replica of it is there, as Serve tells."""
    return any(replica.get("state") == "RUNNING" for replica in deployment.get("replicas", ()))
