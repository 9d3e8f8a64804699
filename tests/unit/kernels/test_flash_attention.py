"""Prompts by FlashInfer, of which a double checks the arguments."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.kernels.batches import make_batch, make_pool
from tests.unit.kernels.flashinfer_double import Calls, wrapper_of
from workers.kernels import LayerCache, StepBatch, TorchKernels
from workers.kernels.gpu.flash_attention import FlashAttention, load_flash_attention

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NUM_BLOCKS = 120
REFERENCE = TorchKernels()
PROMPTS = [(0, 33), (0, 2)]
CHUNKS = [(100, 64), (31, 2), (16, 16), (0, 130), (7, 9)]  # some end with a page, some in it
MIXED = [(40, 1), (0, 33), (0, 1), (90, 20), (17, 1)]  # decode rows and a prompt of one token beside them


class Bench:
    """FlashInfer's double, with the reference for our own kernels."""

    def __init__(self, backend: str = "fa3") -> None:
        self.calls = Calls()
        self.flash = FlashAttention(wrapper_of(self.calls), backend, CPU)
        self.own: list[int] = []  # rows of each call of our own kernels

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        window: int | None = None,
        cap: float | None = None,
        scale: float = 0.1,
    ) -> torch.Tensor:
        def own(rows: torch.Tensor, rest: StepBatch) -> torch.Tensor:
            self.own.append(len(rows))
            assert len(rows) == len(rest.token_ids) == len(rest.positions) == len(rest.slots)
            assert rest.max_context_len == max(rest.context_lens.tolist(), default=0)
            return REFERENCE.paged_attention(rows, cache, rest, scale, window, cap)

        return self.flash.attend(q, cache, batch, scale, window, cap, own)


def noise(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def rows_of(sequences: Sequence[tuple[int, int]]) -> int:
    return sum(length for _, length in sequences)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize(
    "sequences", [PROMPTS, CHUNKS, MIXED, [(0, 5)]], ids=["prompts", "chunks", "mixed", "one"]
)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (24, None), (None, 2.0), (500, 5.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (6, 2, 64), (5, 1, 128)])
def test_it_is_the_reference(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    cap: float | None,
    sequences: Sequence[tuple[int, int]],
) -> None:
    cache = make_pool(NUM_BLOCKS, kv_heads, 8, dim, BF16).layers[1]
    batch, q = make_batch(sequences, 8, NUM_BLOCKS), noise(rows_of(sequences), heads, dim)
    bench = Bench()
    found = bench.attend(q, cache, batch, window, cap)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.1, window, cap))
    assert bench.calls.num_runs == 1
    num_alone = sum(length == 1 for _, length in sequences)
    assert bench.own == ([num_alone] if num_alone else [])


def test_queries_may_be_part_of_wider_rows() -> None:
    cache, batch = make_pool(NUM_BLOCKS, 2, 16, 64, BF16).layers[0], make_batch(CHUNKS, 16, NUM_BLOCKS)
    q = noise(rows_of(CHUNKS), 8, 64)[:, :4]
    found = Bench().attend(q, cache, batch)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.1, None))


def test_rows_alone_in_their_slice_have_the_bits_of_our_own_kernels() -> None:
    cache, batch = make_pool(NUM_BLOCKS, 2, 8, 64, BF16).layers[0], make_batch(MIXED, 8, NUM_BLOCKS)
    q, bench = noise(rows_of(MIXED), 4, 64), Bench()
    found = bench.attend(q, cache, batch)
    for sequence in (0, 2, 4):
        first = int(batch.query_starts[sequence])
        single = dataclasses.replace(
            batch,
            positions=batch.positions[first : first + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=batch.context_lens[sequence : sequence + 1],
            block_tables=batch.block_tables[sequence : sequence + 1],
            host=None,
        )
        wanted = REFERENCE.paged_attention(q[first : first + 1], cache, single, 0.1, None)
        assert torch.equal(found[first : first + 1], wanted)


def test_a_step_is_planned_once_for_each_kind_of_layer() -> None:
    """Two kinds of layers, in turn, as Gemma has them; each has a wrapper of its own for good."""
    pool, bench = make_pool(NUM_BLOCKS, 2, 8, 64, BF16), Bench("fa2")
    for sequences in (MIXED, MIXED, CHUNKS):
        batch, q = make_batch(sequences, 8, NUM_BLOCKS), noise(rows_of(sequences), 4, 64)
        for layer, window in enumerate((None, 16, None)):
            found = bench.attend(q, pool.layers[layer], batch, window, 3.0)
            assert_close(found, REFERENCE.paged_attention(q, pool.layers[layer], batch, 0.1, window, 3.0))
    assert bench.calls.made == ["fa2", "fa2"]
    assert [plan["window_left"] for plan in bench.calls.plans] == [-1, 15] * 3
    assert bench.calls.num_runs == 9


@pytest.mark.parametrize("window", [8, 9, 64, 100])
def test_it_does_not_read_what_lies_before_the_window(window: int) -> None:
    """Blocks that no row sees hold NaN, as those of somebody else may."""
    sequences = [(200, 3), (131, 40), (0, 20)]
    pool, batch = make_pool(NUM_BLOCKS, 2, 8, 64, BF16), make_batch(sequences, 8, NUM_BLOCKS)
    q = noise(rows_of(sequences), 4, 64)
    wanted = REFERENCE.paged_attention(q, pool.layers[0], batch, 0.1, window)
    for sequence, (start, _) in enumerate(sequences):
        unseen = max(0, start - window + 1) // 8
        pool.numbers[batch.block_tables[sequence, :unseen].long()] = float("nan")
    bench = Bench()
    assert_close(bench.attend(q, pool.layers[0], batch, window), wanted)
    assert bench.own == []


@pytest.mark.parametrize(
    "case", ["decode", "graph", "float32", "int8", "head of 80", "window below a block", "tree", "empty"]
)
def test_everything_else_is_for_our_own_kernels(case: str) -> None:
    dim = 80 if case == "head of 80" else 64
    dtype = torch.float32 if case == "float32" else BF16
    sequences = {"decode": [(9, 1), (20, 1)], "empty": []}.get(case, CHUNKS)
    pool = make_pool(NUM_BLOCKS, 2, 8, dim, torch.int8 if case == "int8" else dtype)
    batch, rows = make_batch(sequences, 8, NUM_BLOCKS), rows_of(sequences)
    if case == "graph":
        batch = dataclasses.replace(batch, host=None)
    if case == "tree":
        parents = [index - 1 for _, length in sequences for index in range(length)]
        batch = dataclasses.replace(batch, parents=torch.tensor(parents, dtype=torch.int32))
    window = 7 if case == "window below a block" else None
    q, bench = noise(rows, 4, dim, dtype=dtype), Bench()
    found = bench.attend(q, pool.layers[0], batch, window)
    assert torch.equal(found, REFERENCE.paged_attention(q, pool.layers[0], batch, 0.1, window))
    assert bench.own == [rows] and bench.calls == Calls()


def test_a_first_plan_that_fails_leaves_prompts_to_our_own_kernels(caplog: pytest.LogCaptureFixture) -> None:
    cache, batch = make_pool(NUM_BLOCKS, 2, 8, 64, BF16).layers[0], make_batch(MIXED, 8, NUM_BLOCKS)
    q, bench = noise(rows_of(MIXED), 4, 64), Bench()
    bench.calls.fault = FileNotFoundError("no nvcc")
    for _ in range(2):
        found = bench.attend(q, cache, batch)
        assert torch.equal(found, REFERENCE.paged_attention(q, cache, batch, 0.1, None))
    assert len(caplog.records) == 1 and "FileNotFoundError: no nvcc" in caplog.text
    assert bench.own == [len(q)] * 2 and len(bench.calls.made) == 1


def test_a_later_plan_that_fails_is_a_fault() -> None:
    """Other kernels would go on to other bits."""
    cache, bench = make_pool(NUM_BLOCKS, 2, 8, 64, BF16).layers[0], Bench()
    bench.attend(noise(rows_of(CHUNKS), 4, 64), cache, make_batch(CHUNKS, 8, NUM_BLOCKS))
    bench.calls.fault = RuntimeError("its workspace is too small")
    with pytest.raises(RuntimeError, match="too small"):
        bench.attend(noise(rows_of(MIXED), 4, 64), cache, make_batch(MIXED, 8, NUM_BLOCKS))


@pytest.mark.parametrize(("capability", "backend"), [((9, 0), "fa3"), ((8, 0), "fa2"), ((10, 0), "fa2")])
def test_loading_it(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], backend: str) -> None:
    calls = Calls()
    install(monkeypatch, wrapper_of(calls))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    flash = load_flash_attention(CPU)
    assert flash is not None and calls.made == []
    cache, batch = make_pool(NUM_BLOCKS, 2, 8, 64, BF16).layers[0], make_batch(CHUNKS, 8, NUM_BLOCKS)
    flash.attend(noise(rows_of(CHUNKS), 4, 64), cache, batch, 0.1, None, None, lambda q, rest: q)
    assert calls.made == [backend]


def test_one_that_is_missing_or_unknown_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert load_flash_attention(CPU) is None
    assert "FlashInfer cannot be imported" in caplog.text

    class Old(wrapper_of(Calls())):  # type: ignore[misc]
        def plan(self, qo_indptr: Any, paged_kv_indptr: Any) -> None: ...

    install(monkeypatch, Old)
    assert load_flash_attention(CPU) is None
    assert "plan has no causal, disable_split_kv, head_dim_qk" in caplog.text


def install(monkeypatch: pytest.MonkeyPatch, wrapper: type[Any]) -> None:
    module = ModuleType("flashinfer")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
