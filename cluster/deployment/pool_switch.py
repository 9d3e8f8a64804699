"""Other pools in place of those that answer, without a pause: the deployment that comes in between.

    unified                     what runs: its groups answer
    unified + prefill + decode  in between: the old groups answer until the new ones do
    prefill + decode            as the file says

Serve ends the groups of a pool that a config does not name any more as it starts those of a new one; nobody
would answer until these have loaded. It starts all groups anew for every change of `args`, so those of the
new pools are started twice in this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.parse import check_config
from cluster.config.problems import ConfigError
from cluster.deployment.load import Deployment

_ANSWERING = ("unified", "decode")  # pools; a prefill group only computes prompts for others


def tree_in_between(deployment: Deployment, details: Mapping[str, Any]) -> dict[str, Any] | None:
    """What Serve is to have first: the deployment together with the pool that answers now, whose groups stay
    as many as they are. `details` are those of `ServeApi`.

    None when that is of no use: no pool answers now, or one that the deployment has too, or its groups are
    not replaced by starting others first (`max_surge_percent`), for want of room. Raises ConfigError when
    old and new pools cannot stand together.
    """
    running = details.get("applications", {}).get(deployment.application, {})
    answering = [name for name in _ANSWERING if _has_started(running.get("deployments", {}).get(name, {}))]
    if not answering or any(name in deployment.config.pools.by_name() for name in answering):
        return None
    (old,) = answering  # of two one would be in the deployment
    number = max(running["deployments"][old]["target_num_replicas"], 1)
    sent = running.get("deployed_app_config") or {}
    entry: Mapping[str, Any] = next(
        (entry for entry in sent.get("deployments") or () if entry["name"] == old), {}
    )
    if not entry.get("max_surge_percent"):
        return None
    app = deployment.tree["applications"][deployment.index]
    old_pools = (sent.get("args") or {}).get("pools") or {}
    new_pools = app["args"].get("pools") or {"unified": {}}
    args = {**app["args"], "pools": {**new_pools, old: old_pools.get(old) or {}}}
    config, problems = check_config(args)
    if config is None:
        raise ConfigError(problems)
    kept = {key: value for key, value in entry.items() if key != "autoscaling_config"}
    entries = [*(app.get("deployments") or ()), {**kept, "num_replicas": number}]
    applications = list(deployment.tree["applications"])
    applications[deployment.index] = {**app, "args": args, "deployments": entries}
    return {**deployment.tree, "applications": applications}


def _has_started(deployment: Mapping[str, Any]) -> bool:
    """Whether a replica of it is there, as Serve tells."""
    return any(replica.get("state") == "RUNNING" for replica in deployment.get("replicas", ()))
