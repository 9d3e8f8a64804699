"""The decision as Serve's autoscaling policy of the application: contexts in, numbers of groups out.

A deployment file names it:

    applications:
    - autoscaling_policy: {policy_function: cluster.scaling.serve_policy:ScalingPolicy}
      deployments:
      - {name: unified, autoscaling_config: {min_replicas: 1, max_replicas: 4, ...}}

It runs in Serve's controller, several times a second. Targets and step cost come with the groups' reports
(`told`), so that they stand in the config tree alone; they are remembered while no group is there.
Every change is logged with all its terms, as one line of JSON, and told to the application's directory, where
`tandem status` reads it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.config import AutoscalingContext

from cluster.figures.step_cost import StepCost
from cluster.scaling.decide import Decision, decide
from cluster.scaling.targets import ScalingTargets
from cluster.scaling.told import deployment_of
from cluster.scaling.view import Memory, PoolView
from workers.data_plane.signals import GroupSignals
from workers.directory.actor import NAMESPACE, directory_name
from workers.types import Role

_PERIOD_S = 1.0  # between two decisions; Serve asks more often
_TELL_S = 2.0  # between two notes to the directory
_LOG_S = 30.0  # a line at least so often
_ROLES: Mapping[str, Role] = {role.value: role for role in Role}
_log = logging.getLogger("ray.serve")


class ScalingPolicy:
    """Serve makes one of an application and calls it. What it remembers is `Memory`, and lost when the
    application is deployed anew."""

    def __init__(
        self,
        find_directory: Callable[[str], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve gives nothing. `find_directory`: the handle of an application's directory; raises ValueError
        without one."""
        self._find_directory = find_directory or _find_directory
        self._clock = clock
        self._memory = Memory()
        self._deployment: tuple[ScalingTargets, StepCost] | None = None
        self._wanted: dict[str, int] = {}
        self._decided_s = self._logged_s = self._told_s = float("-inf")
        self._directory: Any = None  # handle of the actor

    def __call__(
        self, contexts: Mapping[Any, AutoscalingContext]
    ) -> tuple[dict[Any, int | float], dict[Any, dict[str, Any]]]:
        """(deployment -> number of replicas, no state of Serve's). Deployments that are no pools stay."""
        now_s = self._clock()
        pools = {ctx.deployment_name: ctx for ctx in contexts.values() if ctx.deployment_name in _ROLES}
        if now_s - self._decided_s >= _PERIOD_S:
            self._decided_s = now_s
            self._decide(pools, now_s)
        return {
            key: self._wanted.get(ctx.deployment_name, ctx.target_num_replicas)
            for key, ctx in contexts.items()
            if ctx.deployment_name in _ROLES
        }, {}

    def _decide(self, pools: Mapping[str, AutoscalingContext], now_s: float) -> None:
        reports = {name: _latest(ctx) for name, ctx in pools.items()}
        for numbers in (numbers for pool in reports.values() for numbers in pool):
            self._deployment = deployment_of(numbers) or self._deployment
        if self._deployment is None:
            self._wanted = {}
            return
        views = {name: _view(ctx, reports[name]) for name, ctx in pools.items()}
        decision = decide(views, *self._deployment, self._memory, now_s)
        self._memory = decision.memory
        self._wanted = {name: pool.target for name, pool in decision.pools.items()}
        self._report(decision, next(iter(pools.values())).app_name or "default", now_s)

    def _report(self, decision: Decision, application: str, now_s: float) -> None:
        has_changed = any(pool.target != pool.before for pool in decision.pools.values())
        if has_changed or now_s - self._logged_s >= _LOG_S:
            self._logged_s = now_s
            _log.info("scaling %s", json.dumps(shown(decision)))
        if has_changed or now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            self._tell(application, json.dumps(shown(decision)))

    def _tell(self, application: str, note: str) -> None:
        """Waits for nobody: the note of a directory that is away is lost."""
        try:
            if self._directory is None:
                self._directory = self._find_directory(application)
            self._directory.note_scaling.remote(note)
        except (RayError, ValueError):  # ValueError: there is none yet
            self._directory = None


def _find_directory(application: str) -> Any:
    return ray.get_actor(directory_name(application), namespace=NAMESPACE)


def shown(decision: Decision) -> dict[str, Any]:
    """A decision as people and programs read it; numbers to three digits."""
    return {
        "slowness": round(decision.memory.slowness, 3),
        "pools": {
            name: {
                "before": pool.before,
                "target": pool.target,
                "needed": round(pool.needed, 3),
                "reason": pool.reason,
                "terms": {term: round(value, 3) for term, value in pool.terms.items()},
            }
            for name, pool in decision.pools.items()
        },
    }


def _latest(context: AutoscalingContext) -> list[dict[str, float]]:
    """The newest numbers of every replica that has told some."""
    by_replica: dict[Any, dict[str, float]] = {}
    for name, series in (context.raw_metrics or {}).items():
        for replica, points in series.items():
            if points:
                by_replica.setdefault(replica, {})[name] = float(points[-1].value)
    return [numbers for numbers in by_replica.values() if "queue_tokens" in numbers]


def _view(context: AutoscalingContext, reports: list[dict[str, float]]) -> PoolView:
    return PoolView(
        role=_ROLES[context.deployment_name],
        target=context.target_num_replicas,
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
        reports=[GroupSignals.of(numbers) for numbers in reports],
        num_wanting=float(context.total_queued_requests) if context.current_num_replicas == 0 else 0.0,
    )
