"""What a follower process is told at its start, as JSON: a token in it must not show in a process list."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from workers.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpeculativeConfig,
    TransferConfig,
)
from workers.runtime.handshake import Rendezvous

_Leaf = TypeVar(
    "_Leaf",
    ModelConfig,
    CacheConfig,
    ScheduleConfig,
    ParallelConfig,
    SpeculativeConfig,
    TransferConfig,
    Rendezvous,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What a follower process needs to know."""

    config: GroupConfig
    rank: int
    rendezvous: Rendezvous

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RankOrder:
        """Raises ValueError for anything but what `to_json` writes."""
        values = _object(json.loads(text), "order")
        config = _object(values.get("config"), "config")
        rank = values.get("rank")
        if type(rank) is not int:
            raise ValueError(f"rank {rank!r} is not a number")
        return RankOrder(
            config=GroupConfig(
                model=_leaf(ModelConfig, config.get("model")),
                cache=_leaf(CacheConfig, config.get("cache")),
                schedule=_leaf(ScheduleConfig, config.get("schedule")),
                parallel=_leaf(ParallelConfig, config.get("parallel")),
                speculative=_leaf(SpeculativeConfig, config.get("speculative")),
                transfer=_leaf(TransferConfig, config.get("transfer")),
            ),
            rank=rank,
            rendezvous=_leaf(Rendezvous, values.get("rendezvous")),
        )


def _object(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _leaf(kind: type[_Leaf], value: object) -> _Leaf:
    values = _object(value, kind.__name__)
    known = {field.name for field in fields(kind)}
    if set(values) != known:
        raise ValueError(f"{kind.__name__} has fields {sorted(values)}, expected {sorted(known)}")
    return kind(**values)  # type: ignore[arg-type]  # fields checked by name above; the writer is our own to_json
