"""What runs on a cluster, joined from the three places that know a part of it.

    Serve's controller   deployments and replicas: state, node, age, what is wanted, what went wrong
    group directory      groups: phase, reason, restarts, process ids of the ranks; how pools are scaled
    router's /load       load: running, waiting, KV blocks; what each group reads of others, and lends them

Each may be away: a row then has None where nobody could say. Pure: everything comes as arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.running.plain import in_one_line
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


FAILED_STATUSES = ("DEPLOY_FAILED", "UNHEALTHY")  # Serve's, of an application


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLoad:
    """What the router last heard from a group."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0
    leases: int = 0
    transferring_blocks: int = 0
    exchange_problem: str = ""
    usage: Mapping[str, Any] | None = None

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
    leases: int | None = None  # readers that its KV blocks are held for
    transferring_blocks: int | None = None  # that it is reading now
    # What holds its recent steps up ("bound") and shares, 0 to 1: of the time in steps ("busy"), and of what
    # the machine can compute and read from memory in that time ("compute", "bandwidth").
    usage: Mapping[str, Any] | None = None
    exchange_problem: str = ""  # why it neither reads KV blocks of others nor lends its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Two groups of which one has read KV blocks of the other, as the reader tells it."""

    source: str
    reader: str
    transport: str = ""  # by which blocks last came
    num_open: int = 0  # reads under way
    num_done: int = 0
    num_failed: int = 0  # that brought less than they wanted
    num_bytes: int = 0
    bytes_per_s: float | None = None  # while bytes were on their way


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationStatus:
    """One application and its parts."""

    name: str
    status: str  # as Serve says it: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, ...
    message: str  # in one line
    desired: int
    ready: int
    deployed_at: float | None
    rows: tuple[GroupRow, ...]
    pairs: tuple[PairRow, ...] = ()
    scaling: Mapping[str, Any] | None = None  # the last decision of autoscaling, see `cluster.scaling`

    @property
    def is_well(self) -> bool:
        """All that is wanted is ready, and was wanted by a deployment that Serve took."""
        return self.ready >= self.desired and self.status not in FAILED_STATUSES


def parse_loads(body: Mapping[str, Any]) -> dict[str, ReportedLoad]:
    """Load by group from the body of `/load`. A group that no router is connected to has said nothing."""
    return {
        group["group"]: ReportedLoad(
            running=group["running"],
            waiting=group["waiting"],
            free_blocks=group["free_blocks"],
            cached_blocks=group["cached_blocks"],
            active_blocks=group["active_blocks"],
            leases=group.get("leases", 0),  # none of a router of an earlier version, as of all reads
            transferring_blocks=group.get("transferring_blocks", 0),
            exchange_problem=group.get("exchange_problem", ""),
            usage=group.get("usage"),
        )
        for group in body.get("groups", ())
        if group["ready"]
    }


def parse_pairs(body: Mapping[str, Any]) -> list[PairRow]:
    """What each group in the body of `/load` tells of its reads, by reader and source."""
    pairs = [
        PairRow(
            source=reads["source"],
            reader=group["group"],
            transport=reads["transport"],
            num_open=reads["open"],
            num_done=reads["done"],
            num_failed=reads["failed"],
            num_bytes=reads["bytes"],
            bytes_per_s=reads["bytes"] / reads["seconds"] if reads["seconds"] else None,
        )
        for group in body.get("groups", ())
        for reads in group.get("reads", ())
    ]
    return sorted(pairs, key=lambda pair: (pair.reader, pair.source))


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
        listing = directories.get(name)
        status = _application(name, app, by_replica, loads, now)
        if listing is not None and not status.rows:
            status = _with_unlisted(status, listing, loads)
        groups = {row.group for row in status.rows}
        own = tuple(pair for pair in pairs if pair.source in groups and pair.reader in groups)
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
        trouble = in_one_line(deployment.get("message"))
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
        message=in_one_line(app.get("message")),
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
        leases=load.leases if load is not None else None,
        transferring_blocks=load.transferring_blocks if load is not None else None,
        exchange_problem=load.exchange_problem if load is not None else "",
        usage=load.usage if load is not None else None,
        age_s=now - started if started else None,
        reason=reason,
    )


def _with_unlisted(
    status: ApplicationStatus, listing: GroupListing, loads: Mapping[str, ReportedLoad]
) -> ApplicationStatus:
    """With what still answers after a deployment that Serve refused, or before it has looked at a new one:
    Serve lists nothing then."""
    rows = [
        replace(
            _row(entry.pool, {"replica_id": entry.replica_id, "state": "RUNNING"}, entry, loads, 0.0, ""),
            reason=entry.reason or "of the deployment before",
        )
        for entry in listing.entries
    ]
    ready = sum(row.state == "ready" for row in rows)
    if any(entry.group_id in loads for entry in listing.entries):  # a router has told them
        rows.insert(0, GroupRow(group="router", role="router", state="ready", reason=rows[0].reason))
        ready += 1
    return replace(
        status,
        desired=len(rows),
        ready=ready,
        rows=tuple(rows),
    )
