"""The policy as Serve calls it: with Serve's own contexts, wrapper and serialisation, without a cluster."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.deployment.scaling_checks import POLICY
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU, StepCost
from cluster.scaling.serve_policy import ScalingPolicy
from cluster.scaling.targets import ScalingTargets
from cluster.scaling.told import deployment_of, told_numbers
from workers.data_plane.signals import GroupSignals

TARGETS = ScalingTargets(ttft_s=0.5, drain_s=1.0, headroom=1.0, scale_down_after_s=5.0, min_reversal_s=5.0)
COST = replace(SMOLLM2_ON_SMALL_CPU, overhead_s=0.0, weights_s=0.0, token_s=0.001, pair_s=0.0)
TOLD = told_numbers(TARGETS, COST)
CONFIG = AutoscalingConfig(min_replicas=1, max_replicas=4, upscale_delay_s=0, downscale_delay_s=0)


@dataclass
class Directory:
    """The actor's handle, as far as the policy uses it."""

    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def note_scaling(self) -> Directory:
        return self

    def remote(self, note: str) -> None:
        self.notes.append(json.loads(note))


@dataclass
class Pool:
    """A deployment in Serve's controller."""

    name: str
    target: int = 1
    signals: list[GroupSignals] = field(default_factory=lambda: [GroupSignals()])
    queued: float = 0.0
    least: int = 1

    @property
    def id(self) -> DeploymentID:
        return DeploymentID(name=self.name, app_name="tandem")

    def context(self) -> AutoscalingContext:
        replicas = [ReplicaID(f"r{i}", self.id) for i in range(len(self.signals))]
        raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
        for replica, signals in zip(replicas, self.signals, strict=True):
            for name, value in {**asdict(signals), **TOLD, "running_requests": 7.0}.items():
                old, new = TimeStampedValue(1.0, -1.0), TimeStampedValue(2.0, float(value))
                raw.setdefault(name, {})[replica] = [old, new]
        return AutoscalingContext(
            deployment_id=self.id,
            deployment_name=self.name,
            app_name="tandem",
            current_num_replicas=len(replicas),
            target_num_replicas=self.target,
            running_replicas=replicas,
            total_num_requests=self.queued,
            total_queued_requests=self.queued,
            aggregated_metrics={},
            raw_metrics=raw,
            capacity_adjusted_min_replicas=self.least,
            capacity_adjusted_max_replicas=4,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=CONFIG.model_copy(update={"min_replicas": self.least}),
        )


class Controller:
    """Serve's loop around the policy."""

    def __init__(self, *pools: Pool) -> None:
        self.pools = pools
        self.now_s = 0.0
        self.directory = Directory()
        self.policy = ScalingPolicy(lambda _: self.directory, lambda: self.now_s)
        self._wrapped = _apply_app_level_autoscaling_config(self.policy)

    def tick(self, seconds: float = 1.0) -> dict[str, int]:
        self.now_s += seconds
        decided, _ = self._wrapped({pool.id: pool.context() for pool in self.pools})
        for pool in self.pools:
            pool.target = decided.get(pool.id, pool.target)
        return {key.name: value for key, value in decided.items()}


def test_the_class_is_what_the_file_names_and_survives_serve() -> None:
    policy = _resolve_policy_callable(AutoscalingPolicy(policy_function=POLICY))
    assert callable(policy) and type(policy).__name__ == "ScalingPolicy"
    assert policy({}) == ({}, {})


def test_targets_and_cost_come_back_as_they_were_told() -> None:
    for targets in (TARGETS, replace(TARGETS, prefill_per_decode=0.5)):
        assert deployment_of({**told_numbers(targets, COST), "queue_tokens": 1.0}) == (targets, COST)
    assert deployment_of({"queue_tokens": 1.0}) is None
    assert isinstance(COST, StepCost)


def test_pools_are_scaled_and_the_router_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    unified, router = Pool("unified"), Pool("router")
    controller = Controller(unified, router)
    assert controller.tick() == {"unified": 1}
    unified.signals = [GroupSignals(queue_tokens=2500.0)]  # 1000 tokens a second, within one
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        assert controller.tick() == {"unified": 3}
    (line,) = [record.getMessage() for record in caplog.records if "scaling" in record.getMessage()]
    pool = json.loads(line.removeprefix("scaling "))["pools"]["unified"]
    assert (pool["before"], pool["target"], pool["needed"], pool["reason"]) == (1, 3, 2.5, "up")
    assert pool["terms"]["queue"] == 2.5
    assert controller.directory.notes[-1]["pools"]["unified"] == pool
    unified.signals = [GroupSignals(running=1.0)] * 3
    sizes = [controller.tick()["unified"] for _ in range(8)]
    assert sizes == [3, 3, 3, 3, 3, 1, 1, 1]


def test_it_decides_once_a_second_however_often_it_is_asked() -> None:
    unified = Pool("unified")
    controller = Controller(unified)
    controller.tick()
    unified.signals = [GroupSignals(queue_tokens=2500.0)]
    assert controller.tick(0.5) == {"unified": 1}
    assert controller.tick(0.5) == {"unified": 3}


def test_a_pool_at_zero_that_is_wanted_gets_a_group() -> None:
    unified = Pool("unified", least=0)
    controller = Controller(unified)
    for _ in range(int(TARGETS.idle_to_zero_s) + 2):
        controller.tick()
    assert unified.target == 0
    unified.signals, unified.queued = [], 2.0
    assert controller.tick() == {"unified": 1}
    assert controller.tick() == {"unified": 1}


def test_nothing_changes_before_a_group_has_told_its_targets() -> None:
    unified = Pool("unified", target=2, signals=[])
    assert Controller(unified).tick() == {"unified": 2}
