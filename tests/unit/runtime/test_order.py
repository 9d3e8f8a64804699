"""A follower's order survives JSON, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest

from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig
from workers.runtime.handshake import Rendezvous
from workers.runtime.order import RankOrder

ORDER = RankOrder(
    config=GroupConfig(
        model=ModelConfig(path="/m", dtype="float32", max_model_len=99),
        cache=CacheConfig(num_blocks=7, memory_fraction=0.25),
        schedule=ScheduleConfig(max_prefill_chunk=3),
        parallel=ParallelConfig(tensor_parallel=4, step_timeout_s=2.5),
    ),
    rank=3,
    rendezvous=Rendezvous(host="127.0.0.1", store_port=1, control_port=2, token="secret"),
)


def test_round_trip():
    assert RankOrder.from_json(ORDER.to_json()) == ORDER


def test_other_json_is_refused():
    for text in ("[]", "{}", "3", "{"):
        with pytest.raises(ValueError):
            RankOrder.from_json(text)
    values = json.loads(ORDER.to_json())
    values["config"]["cache"]["surprise"] = 1
    with pytest.raises(ValueError, match="surprise"):
        RankOrder.from_json(json.dumps(values))
    values = json.loads(ORDER.to_json())
    values["rank"] = "3"
    with pytest.raises(ValueError, match="rank '3'"):
        RankOrder.from_json(json.dumps(values))
