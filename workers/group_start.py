"""What a group's front and its rank processes tell each other at start. No torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import GroupConfig
from workers.types import GroupId, GroupInfo, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStart:
    """One start of a group: its config, and who it is."""

    config: GroupConfig
    group_id: GroupId
    epoch: int
    role: Role
    secret: bytes  # of the application: whoever connects to rank 0 must know it
    on_loopback: bool  # ranks and routers meet on 127.0.0.1; else on the machines' own addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank's process is."""

    pid: int
    node_id: str  # Ray's id of the machine
    gpus: tuple[str, ...]  # what Ray has given to it, as CUDA_VISIBLE_DEVICES names them


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGroup:
    """What rank 0 says when the group is ready."""

    info: GroupInfo
    address: tuple[str, int]  # for routers and the front


def group_id_of(pool: str, replica_id: str) -> GroupId:
    """Id of the group whose front is this Serve replica. A rebuilt group is a new replica, so a new id."""
    return GroupId(f"{pool}-{replica_id}")


def pool_of(group_id: GroupId) -> str:
    """The pool of a group, which is the name of its Serve deployment."""
    return group_id.partition("-")[0]
