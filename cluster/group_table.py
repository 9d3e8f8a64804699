"""What runs on a cluster, joined from the three places that know a part of it.

    Serve's controller   deployments and replicas: state, node, age, what is wanted, what went wrong
    group directory      groups: phase, reason, restarts, process ids of the ranks; how pools are scaled
    router's /metrics    load: running, waiting, KV blocks; pairs of which one has read blocks of the other

Each may be away: a row then has None where nobody could say. Pure: everything comes as arguments.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from router.telemetry.group_metrics import KV_BLOCKS, RUNNING, WAITING
from router.telemetry.metric_spec import PREFIX
from router.telemetry.metrics import KV_PAIR_FAILURES, KV_PAIR_RATE, KV_PAIR_READS
from workers.directory.groups import GroupEntry, GroupListing, GroupPhase

# Serve's replica states, in our words.
_REPLICA_STATES = {
    "PENDING_ALLOCATION": "starting",
    "STARTING": "starting",
    "PENDING_INITIALIZATION": "loading",
    "UPDATING": "loading",
    "RECOVERING": "loading",
    "RUNNING": "ready",
    "STOPPING": "draining",
    "PENDING_MIGRATION": "draining",
}
_WAITING_REASONS = {
    "PENDING_ALLOCATION": "waiting for free CPUs or GPUs in the Ray cluster",
    "STARTING": "the replica's process starts",
    "PENDING_INITIALIZATION": "ranks start and read weights",
}

(_KV_STATE,) = KV_BLOCKS.labels
# Series of /metrics (name, state of KV blocks) -> field of ReportedLoad.
_LOAD_FIELDS = {
    (PREFIX + RUNNING.name, ""): "running",
    (PREFIX + WAITING.name, ""): "waiting",
    (PREFIX + KV_BLOCKS.name, "free"): "free_blocks",
    (PREFIX + KV_BLOCKS.name, "cached"): "cached_blocks",
    (PREFIX + KV_BLOCKS.name, "active"): "active_blocks",
}

# Series of /metrics -> field of PairRow.
_PAIR_FIELDS = {
    f"{PREFIX}{KV_PAIR_READS.name}_total": "num_reads",
    f"{PREFIX}{KV_PAIR_FAILURES.name}_total": "num_failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoad:
    """What the router last heard from a group."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0

    @property
    def kv_percent(self) -> float | None:
        """Share of the KV pool that requests hold."""
        total = self.free_blocks + self.cached_blocks + self.active_blocks
        return 100.0 * self.active_blocks / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One worker group, or a replica of the router."""

    group: str
    role: str
    state: str  # starting, loading, ready, draining, failed
    node: str = ""
    front_pid: int | None = None
    rank_pids: tuple[int, ...] = ()
    running: int | None = None
    waiting: int | None = None
    kv_percent: float | None = None
    restarts: int | None = None  # groups of its pool that ended in failure so far
    age_s: float | None = None
    reason: str = ""  # why it is not ready


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Two groups between which KV blocks have been read, as all router replicas together know it."""

    source: str
    reader: str
    num_reads: int = 0
    num_failed: int = 0
    bytes_per_s: float | None = None  # mean of those that have measured it


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationStatus:
    """One application and its parts."""

    name: str
    status: str  # as Serve says it: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, ...
    message: str
    desired: int
    ready: int
    deployed_at: float | None
    rows: tuple[GroupRow, ...]
    pairs: tuple[PairRow, ...] = ()
    scaling: Mapping[str, Any] | None = None  # the last decision of autoscaling, see `cluster.scaling`


def parse_loads(metrics_text: str) -> dict[str, ReportedLoad]:
    """Load by group from the text of `/metrics`."""
    loads: dict[str, ReportedLoad] = {}
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            field = _LOAD_FIELDS.get((sample.name, sample.labels.get(_KV_STATE, "")))
            if field is not None:
                group = sample.labels["group"]
                loads[group] = replace(loads.get(group, ReportedLoad()), **{field: int(sample.value)})
    return loads


def parse_pairs(metrics_text: str) -> list[PairRow]:
    """The pairs in the text of `/metrics`, by their ids."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    rates: dict[tuple[str, str], list[float]] = {}
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            pair = (sample.labels.get("source", ""), sample.labels.get("reader", ""))
            if sample.name == PREFIX + KV_PAIR_RATE.name:
                rates.setdefault(pair, []).append(sample.value)
            elif (field := _PAIR_FIELDS.get(sample.name)) is not None:
                counts.setdefault(pair, Counter())[field] += int(sample.value)
    return [
        PairRow(
            source=pair[0], reader=pair[1], bytes_per_s=fmean(rates[pair]) if pair in rates else None, **count
        )
        for pair, count in sorted(counts.items())
    ]


def application_statuses(
    details: Mapping[str, Any],
    directories: Mapping[str, GroupListing],
    loads: Mapping[str, ReportedLoad],
    pairs: Sequence[PairRow] = (),
    *,
    now: float,
) -> list[ApplicationStatus]:
    """Every application that Serve knows; `now` is Unix time."""
    by_replica = {entry.replica_id: entry for listing in directories.values() for entry in listing.entries}
    statuses = []
    for name, app in sorted(details.get("applications", {}).items()):
        status = _application(name, app, by_replica, loads, now)
        groups = {row.group for row in status.rows}
        own = tuple(pair for pair in pairs if pair.source in groups and pair.reader in groups)
        listing = directories.get(name)
        scaling = json.loads(listing.scaling) if listing is not None and listing.scaling else None
        statuses.append(replace(status, pairs=own, scaling=scaling))
    return statuses


def _application(
    name: str,
    app: Mapping[str, Any],
    by_replica: Mapping[str, GroupEntry],
    loads: Mapping[str, ReportedLoad],
    now: float,
) -> ApplicationStatus:
    rows: list[GroupRow] = []
    desired = ready = 0
    for deployment_name, deployment in app.get("deployments", {}).items():
        replicas = deployment.get("replicas", [])
        target = int(deployment.get("target_num_replicas", len(replicas)))
        desired += target
        trouble = _first_line(deployment.get("message", ""))
        own = [
            _row(
                deployment_name, replica, by_replica.get(str(replica.get("replica_id"))), loads, now, trouble
            )
            for replica in replicas
        ]
        ready += sum(row.state == "ready" for row in own)
        for number in range(len(own), target):
            reason = trouble or "not started yet"
            own.append(
                GroupRow(
                    group=f"{deployment_name} #{number + 1}",
                    role=deployment_name,
                    state="starting",
                    reason=reason,
                )
            )
        rows += own
    return ApplicationStatus(
        name=name,
        status=str(app.get("status", "UNKNOWN")),
        message=_first_line(app.get("message", "")),
        desired=desired,
        ready=ready,
        deployed_at=app.get("last_deployed_time_s"),
        rows=tuple(rows),
    )


def _row(
    deployment: str,
    replica: Mapping[str, Any],
    entry: GroupEntry | None,
    loads: Mapping[str, ReportedLoad],
    now: float,
    trouble: str,
) -> GroupRow:
    serve_state = str(replica.get("state", ""))
    state = _REPLICA_STATES.get(serve_state, "starting")
    reason = "" if state == "ready" else trouble or _WAITING_REASONS.get(serve_state, "")
    started = replica.get("start_time_s")
    group = str(replica.get("replica_id", "?"))
    load = None
    if entry is not None:
        group = entry.group_id
        load = loads.get(entry.group_id)
        if serve_state != "STOPPING" and entry.phase is not GroupPhase.READY:
            state, reason = entry.phase.value, entry.reason or reason
    return GroupRow(
        group=group,
        role=entry.role.value if entry is not None else deployment,
        state=state,
        node=str(replica.get("node_ip") or ""),
        front_pid=replica.get("pid"),
        rank_pids=entry.rank_pids if entry is not None else (),
        running=load.running if load is not None else None,
        waiting=load.waiting if load is not None else None,
        kv_percent=load.kv_percent if load is not None else None,
        restarts=entry.restarts if entry is not None else None,
        age_s=now - started if started else None,
        reason=reason,
    )


def _first_line(text: object) -> str:
    lines = str(text or "").strip().splitlines()
    return lines[0][:300] if lines else ""
