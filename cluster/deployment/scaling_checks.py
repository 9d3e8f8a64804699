"""What a deployment file must say so that its pools are scaled by our policy, and only by it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.config.problems import Problem, join, unknown_key
from cluster.config.tree import TandemConfig

POLICY = "cluster.scaling.serve_policy:ScalingPolicy"
_POLICY_KEYS = ("policy_function", "policy_kwargs")
_DELAYS = ("upscale_delay_s", "downscale_delay_s")
_FUNCTION = re.compile(r"([^\W\d]\w*\.)*[^\W\d]\w*[.:][^\W\d]\w*")


def scaling_problems(app: Mapping[str, Any], config: TandemConfig, router: str) -> Iterable[Problem]:
    """Of an application; paths begin inside of it. `router`: name of its deployment."""
    deployments = app.get("deployments")
    listed = deployments if isinstance(deployments, list) else ()
    entries = {index: entry for index, entry in enumerate(listed) if isinstance(entry, Mapping)}
    scaled = {
        index: entry
        for index, entry in entries.items()
        if isinstance(entry.get("autoscaling_config"), Mapping)
    }
    for index, entry in entries.items():
        if entry.get("num_replicas") == "auto":
            yield Problem(
                path=f"deployments[{index}].num_replicas",
                message="means bounds and delays of Serve's own, up to 100 groups",
                got="'auto'",
                allowed="a number",
                hint="a pool that is autoscaled has autoscaling_config with its bounds instead",
            )
    policy = app.get("autoscaling_policy")
    if isinstance(policy, Mapping):
        for key in policy:
            if key not in _POLICY_KEYS:
                yield unknown_key(join("autoscaling_policy", key), key, _POLICY_KEYS)
        yield from _function_problems(policy.get("policy_function"))
    elif scaled:
        yield Problem(
            path="deployments",
            message="pools are autoscaled without a policy that knows their load",
            hint=f"add to the application: autoscaling_policy: {{policy_function: {POLICY}}}",
        )
    is_ours = isinstance(policy, Mapping) and policy.get("policy_function") == POLICY
    for index, entry in scaled.items():
        path = f"deployments[{index}].autoscaling_config"
        if entry.get("name") == router:
            yield Problem(path=path, message="the router is not autoscaled", hint="give it num_replicas")
        elif is_ours:
            yield from _delays(path, entry["autoscaling_config"])
    yield from _zero_problems(scaled, config)


def _function_problems(function: object) -> Iterable[Problem]:
    """Serve imports it only when the application is deployed."""
    path = "autoscaling_policy.policy_function"
    if function is None:
        yield Problem(path=path, message="must be given", hint=f"ours is {POLICY}")
    elif not isinstance(function, str) or not _FUNCTION.fullmatch(function):
        got = repr(function)[:100]
        yield Problem(path=path, message="names no function", got=got, allowed=f"module:name, as {POLICY}")
    elif function.startswith("cluster.") and function.replace(":", ".") != POLICY.replace(":", "."):
        yield Problem(path=path, message="Tandem has no such policy", got=function[:100], allowed=POLICY)


def _delays(path: str, scaling: Mapping[str, Any]) -> Iterable[Problem]:
    for name in _DELAYS:
        if scaling.get(name) != 0:
            yield Problem(
                path=join(path, name),
                message="the policy has its own damping, and Serve's would come on top",
                got=str(scaling.get(name, "nothing, which means Serve's 30 s or 600 s")),
                allowed="0",
                hint="damping is scaling.scale_down_after_s and scaling.min_reversal_s in args",
            )


def _zero_problems(scaled: Mapping[int, Mapping[str, Any]], config: TandemConfig) -> Iterable[Problem]:
    least = {
        name: entry["autoscaling_config"].get("min_replicas", 1)
        for entry in scaled.values()
        if isinstance(name := entry.get("name"), str)
    }
    answering = [name for name in config.pools.by_name() if name != "prefill"]
    if answering and all(least.get(name) == 0 for name in answering) and not config.router.http.group_wait_s:
        yield Problem(
            path="args.router.http.group_wait_s",
            message="no pool keeps a group that answers, so a request must wait for the first one",
            got="0",
            hint="set it to the seconds that a group takes to start, with a margin, or a min_replicas to 1",
        )
