"""How many blocks a pool gets, and what refusals say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workers.config import CacheConfig, ScheduleConfig
from workers.host_memory import available_host_bytes
from workers.kernels import CacheForm
from workers.model.spec import spec_from_config
from workers.runtime.errors import PoolTooSmall
from workers.runtime.kv_pool import allocate_pool
from workers.runtime.pool_size import FreeMemory, bytes_per_block, num_blocks_for

SPEC = spec_from_config(
    {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
    }
)
MIB = 1 << 20


def form(dtype: torch.dtype) -> CacheForm:
    return CacheForm(num_kv_heads=2, num_layers=3, block_size=16, head_dim=16, dtype=dtype)


def blocks(
    cache: CacheConfig, *, free: int = 100 * MIB, sharers: int = 1, host: bool = True, **other: int
) -> int:
    return num_blocks_for(
        cache,
        ScheduleConfig(max_running=other.get("max_running", 10_000)),
        block_bytes=other.get("block_bytes", MIB),
        max_model_len=other.get("max_model_len", 64),
        free=FreeMemory(num_bytes=free, num_sharers=sharers, is_host=host),
    )


def test_block_bytes_and_pool_shape():
    size = bytes_per_block(SPEC, 2, 16, "bfloat16")
    assert size == 2 * 3 * 2 * 16 * 16 * 2
    pool = allocate_pool(5, form(torch.bfloat16), torch.device("cpu"))
    assert pool.numbers.shape == (5, 2, 3, 2, 16, 16)
    assert pool.memory.shape == (5, size)
    assert not pool.memory.any()
    # A range of heads of a block, over all layers, is one contiguous run.
    assert pool.numbers[3, 1:2].is_contiguous()


def test_int8_blocks_hold_codes_and_scales():
    size = bytes_per_block(SPEC, 2, 16, "int8")
    assert size == 2 * 3 * 2 * 16 * (16 + 2)
    pool = allocate_pool(5, form(torch.int8), torch.device("cpu"))
    assert pool.memory.shape == (5, size) and not pool.memory.any()
    assert pool.scales is not None and pool.scales.shape == (5, 2, 3, 2, 16)
    page, cache = 16 * 18, pool.layers[1]  # of keys; those of the values follow
    cache.keys[4, 1, 2] = 7
    cache.value_scales[4, 1, 15] = 1.0
    start = (3 + 1) * 2 * page  # head 1, layer 1
    assert pool.memory[4].nonzero().flatten().tolist() == [
        *range(start + 2 * 16, start + 3 * 16),
        start + 2 * page - 1,  # the upper byte of 1.0
    ]


@pytest.mark.parametrize(("head_dim", "least"), [(64, 1.9), (128, 1.9), (16, 1.7)])
def test_an_int8_pool_holds_nearly_twice_the_tokens(head_dim: int, least: float) -> None:
    spec = replace(SPEC, head_dim=head_dim)
    assert bytes_per_block(spec, 2, 16, "bfloat16") >= least * bytes_per_block(spec, 2, 16, "int8")


def test_int8_pages_of_an_odd_size_are_refused():
    with pytest.raises(ValueError, match=r"with heads of 5 numbers cache\.block_size must be even, not 3"):
        replace(form(torch.int8), head_dim=5, block_size=3)


def test_configured_number_is_taken_as_it_is():
    assert blocks(CacheConfig(num_blocks=4), free=0) == 4


def test_configured_number_too_small_names_the_smallest():
    with pytest.raises(PoolTooSmall, match=r"must be at least 5 .*max_model_len to 64\)"):
        blocks(CacheConfig(num_blocks=4), max_model_len=65)


@pytest.mark.parametrize(
    ("cache", "options", "expected"),
    [
        (CacheConfig(), {}, 50),
        (CacheConfig(memory_fraction=0.25), {}, 25),
        (CacheConfig(), {"sharers": 2}, 25),
        (CacheConfig(max_bytes=10 * MIB), {}, 10),
        (CacheConfig(max_bytes=10 * MIB), {"sharers": 2}, 5),
        (CacheConfig(max_bytes=10 * MIB), {"host": False}, 50),
        (CacheConfig(), {"free": 100 * MIB, "block_bytes": 1024, "max_running": 8}, 4096),
        (CacheConfig(), {"free": 100 * MIB, "block_bytes": 1024, "max_running": 500}, 8000),
    ],
)
def test_measured_number(cache, options, expected):
    assert blocks(cache, **options) == expected


def test_too_little_memory_says_what_would_fit():
    with pytest.raises(PoolTooSmall, match=r"3 MiB for the KV pool.*needs 4.0 MiB.*at most 48"):
        blocks(CacheConfig(), free=6 * MIB)


def test_memory_is_the_least_of_machine_and_container(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    5000 kB\n")
    assert available_host_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_host_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert available_host_bytes(meminfo, tmp_path) == 2_200_000


def test_memory_of_a_version_1_container(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:    5000 kB\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("700000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("900000\n")
    assert available_host_bytes(meminfo, tmp_path) == 0


def test_this_machine_has_memory():
    assert available_host_bytes() > 0
