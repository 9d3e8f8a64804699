"""The step in one call against the operators one by one: equal bits."""

from __future__ import annotations

import mmap
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.batches import batch_of, fill, make_message
from tests.unit.kernels.builds import PACKED, build
from workers.kernels import (
    NOT_FINITE,
    CacheForm,
    Draw,
    FusedStep,
    Kernels,
    PackedLinear,
    PagedCache,
    Quantization,
    StepLayer,
    StepMessage,
    StepModel,
    Turn,
    kernels_for,
    unpack,
)
from workers.kernels.collective import CollectiveFailed, SharedCollective, memory_bytes
from workers.kernels.native import CpuKernels

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, LAYERS = 96, 6, 2, 24, 200, 300, 3
BLOCK_SIZE, NUM_BLOCKS = 8, 60

FORMS = [Quantization.NONE, Quantization.INT8, Quantization.INT4]


@pytest.fixture(params=PACKED)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(build(request.param), torch.bfloat16)


def make_model(
    kernels: Kernels,
    dtype: torch.dtype,
    *,
    bias: bool,
    head_norm: bool,
    quantization: Quantization = Quantization.NONE,
    dim: int = DIM,
    inner: int = INNER,
    kv_heads: int = KV_HEADS,
) -> StepModel:
    heads = HEADS // KV_HEADS * kv_heads

    def vector(n: int) -> torch.Tensor:
        return torch.randn(n).to(dtype)

    def linear(out_features: int, in_features: int, out_dtype: torch.dtype | None = None) -> PackedLinear:
        weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
        return kernels.pack_linear(weight, vector(out_features) if bias else None, out_dtype, quantization)

    layers = tuple(
        StepLayer(
            attention_norm=vector(HIDDEN),
            qkv=linear((heads + 2 * kv_heads) * dim, HIDDEN),
            query_norm=vector(dim) if head_norm else None,
            key_norm=vector(dim) if head_norm else None,
            output=linear(HIDDEN, heads * dim),
            mlp_norm=vector(HIDDEN),
            up=linear(2 * inner, HIDDEN),
            down=linear(HIDDEN, inner),
            scale=dim**-0.5,
            sliding_window=40 if index == 1 else None,
        )
        for index in range(LAYERS)
    )
    return StepModel(
        embedding=torch.randn(VOCAB, HIDDEN).to(dtype),
        first_id=0,
        vocab_size=VOCAB,
        layers=layers,
        final_norm=vector(HIDDEN),
        head=linear(VOCAB, HIDDEN, torch.float32),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        norm_eps=1e-5,
    )


def step_of(mix: list[tuple[int, int]], logit_rows: list[int]) -> StepMessage:
    return make_message(mix, BLOCK_SIZE, NUM_BLOCKS, logit_rows=logit_rows, vocab_size=VOCAB)


def empty(dim: int = DIM, dtype: torch.dtype = torch.bfloat16, kv_heads: int = KV_HEADS) -> PagedCache:
    form = CacheForm(
        num_kv_heads=kv_heads, num_layers=LAYERS, block_size=BLOCK_SIZE, head_dim=dim, dtype=dtype
    )
    return PagedCache.zeros(NUM_BLOCKS, form)


def noise(dim: int = DIM, dtype: torch.dtype = torch.bfloat16, kv_heads: int = KV_HEADS) -> PagedCache:
    kv = empty(dim, dtype, kv_heads)
    fill(kv, torch.default_generator)
    return kv


def turn_of(width: int, num_positions: int = 200) -> Turn:
    angles = torch.rand(num_positions, width // 2) * 6
    return angles.cos(), angles.sin()


def one_by_one(
    kernels: Kernels,
    model: StepModel,
    message: StepMessage,
    turn: Turn | None,
    kv: PagedCache,
) -> torch.Tensor:
    eps, batch = model.norm_eps, batch_of(message, BLOCK_SIZE, NUM_BLOCKS, VOCAB)
    cos, sin = (None, None) if turn is None else (each[batch.positions] for each in turn)
    own_ids = batch.token_ids - model.first_id
    is_own = (own_ids >= 0) & (own_ids < len(model.embedding))
    residual = model.embedding[own_ids * is_own] * is_own[:, None]
    if model.collective is not None:
        model.collective.all_reduce(residual)
    normed = kernels.rms_norm(residual, model.layers[0].attention_norm, eps)
    for index, layer in enumerate(model.layers):
        qkv = layer.qkv(normed).view(-1, HEADS + 2 * KV_HEADS, model.head_dim)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = kernels.rms_norm(q, layer.query_norm, eps), kernels.rms_norm(k, layer.key_norm, eps)
        q = kernels.rotary_and_write(q, k, v, cos, sin, batch, kv.layers[index])
        attended = kernels.paged_attention(q, kv.layers[index], batch, layer.scale, layer.sliding_window)
        mixed = layer.output(attended.flatten(1))
        if model.collective is not None:
            model.collective.all_reduce(mixed)
        normed, residual = kernels.add_rms_norm(mixed, residual, layer.mlp_norm, eps)
        mixed = layer.down(kernels.silu_mul(layer.up(normed)))
        if model.collective is not None:
            model.collective.all_reduce(mixed)
        following = model.layers[index + 1].attention_norm if index + 1 < LAYERS else model.final_norm
        normed, residual = kernels.add_rms_norm(mixed, residual, following, eps)
    return model.head(normed[batch.logit_rows])


@pytest.mark.parametrize("rotary", [None, 16, DIM])
@pytest.mark.parametrize(("bias", "head_norm"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("mix", "logit_rows"),
    [
        ([(0, 1)], [0]),
        ([(70, 1), (3, 1), (64, 1)], [0, 1, 2]),
        ([(0, 120), (9, 1)], [119, 120]),
        ([(30, 20)], list(range(20))),
        ([(8, 9)], []),
        ([], []),
    ],
)
def test_equal_bits(
    kernels: Kernels,
    mix: list[tuple[int, int]],
    logit_rows: list[int],
    bias: bool,
    head_norm: bool,
    rotary: int | None,
) -> None:
    model = make_model(kernels, torch.bfloat16, bias=bias, head_norm=head_norm)
    step = kernels.fuse(model)
    assert step is not None
    message = step_of(mix, logit_rows)
    turn = None if rotary is None else turn_of(rotary)
    kv = noise()
    kv_fused = kv.clone()
    wanted = one_by_one(kernels, model, message, turn, kv)
    assert torch.equal(step(message, turn, kv_fused).logits, wanted)
    assert torch.equal(kv_fused.memory, kv.memory)
    assert wanted.shape == (len(logit_rows), VOCAB) and wanted.dtype == torch.float32
    assert torch.equal(step(message, turn, kv_fused).logits, wanted)  # buffers are used again


def test_heads_may_be_wider_than_all_else(kernels: Kernels) -> None:
    """Their norms need room in the scratch of a row, which no other operator does."""
    dim = 4 * max(HIDDEN, INNER)
    model = make_model(kernels, torch.bfloat16, bias=False, head_norm=True, dim=dim)
    step = kernels.fuse(model)
    assert step is not None
    message = step_of([(0, 3), (9, 1)], [2, 3])
    kv = noise(dim)
    wanted = one_by_one(kernels, model, message, None, kv.clone())
    assert torch.equal(step(message, None, kv).logits, wanted)


@pytest.mark.parametrize("quantization", FORMS[1:], ids=str)
@pytest.mark.parametrize(
    ("mix", "logit_rows"),
    [
        ([(0, 1)], [0]),
        ([(70, 1), (3, 1), (64, 1)], [0, 1, 2]),
        ([(0, 120), (9, 1)], [119, 120]),
        ([(8, 9)], []),
    ],
)
def test_equal_bits_quantized(
    kernels: Kernels, mix: list[tuple[int, int]], logit_rows: list[int], quantization: Quantization
) -> None:
    model = make_model(kernels, torch.bfloat16, bias=True, head_norm=True, quantization=quantization)
    step = kernels.fuse(model)
    assert step is not None
    message, turn = step_of(mix, logit_rows), turn_of(DIM)
    kv = noise()
    kv_fused = kv.clone()
    wanted = one_by_one(kernels, model, message, turn, kv)
    assert torch.equal(step(message, turn, kv_fused).logits, wanted)
    assert torch.equal(kv_fused.memory, kv.memory)


@pytest.mark.parametrize("dim", [DIM, 64, 22])
@pytest.mark.parametrize(
    ("mix", "logit_rows"),
    [([(70, 1), (3, 1), (64, 1)], [0, 1, 2]), ([(0, 120), (9, 1)], [119, 120]), ([], [])],
)
def test_equal_bits_over_int8_pages(
    kernels: Kernels, mix: list[tuple[int, int]], logit_rows: list[int], dim: int
) -> None:
    model = make_model(kernels, torch.bfloat16, bias=True, head_norm=True, dim=dim)
    step = kernels.fuse(model)
    assert step is not None
    message, turn = step_of(mix, logit_rows), turn_of(dim - 2)
    kv = noise(dim, torch.int8)
    kv_fused, other = kv.clone(), noise(dim)
    wanted = one_by_one(kernels, model, message, turn, kv)
    assert torch.equal(step(message, turn, kv_fused).logits, wanted)
    assert torch.equal(kv_fused.memory, kv.memory)
    step(message, turn, other)  # the form is that of the pool it is given
    assert torch.equal(step(message, turn, kv_fused).logits, wanted)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("inner", [INNER, 192])  # 192: gates and their columns in units of their own
@pytest.mark.parametrize(
    ("mix", "logit_rows"), [([(0, 120), (9, 1)], [119, 120]), ([(70, 1), (3, 1), (64, 1)], [2, 0])]
)
def test_any_threads_give_the_bits_of_single_operators(
    kernels: Kernels, mix: list[tuple[int, int]], logit_rows: list[int], inner: int, form: Quantization
) -> None:
    model = make_model(kernels, torch.bfloat16, bias=True, head_norm=True, quantization=form, inner=inner)
    step = kernels.fuse(model)
    assert step is not None
    message, turn, before = step_of(mix, logit_rows), turn_of(DIM), noise()
    kv = before.clone()
    wanted = one_by_one(kernels, model, message, turn, kv)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        kv_fused = before.clone()
        assert torch.equal(step(message, turn, kv_fused).logits, wanted), threads
        assert torch.equal(kv_fused.memory, kv.memory), threads


@pytest.mark.parametrize("rows", [[5, 1], [7], list(range(8)), list(range(8)) * 20])
def test_logits_of_one_step_after_another(kernels: Kernels, rows: list[int]) -> None:
    step = kernels.fuse(make_model(kernels, torch.bfloat16, bias=True, head_norm=True))
    assert step is not None
    kv = empty()
    everything = step_of([(0, 8)], list(range(8)))
    some = step_of([(0, 8)], rows)
    wanted = step(everything, None, kv).logits.clone()
    assert torch.equal(step(some, None, kv).logits, wanted[rows])
    assert torch.equal(step(everything, None, kv).logits, wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_ids_are_drawn_as_from_the_logits(kernels: Kernels, threads: int) -> None:
    torch.set_num_threads(threads)
    model = make_model(kernels, torch.bfloat16, bias=True, head_norm=True)
    step = kernels.fuse(model)
    assert step is not None
    draws = [
        Draw(temperature=temperature, top_k=top_k, top_p=1.0, min_p=0.0, uniform=uniform)
        for temperature, top_k, uniform in ((0.0, 0, 0.0), (1.0, 0, 0.3), (0.7, 9, 0.9), (2.0, 0, 0.5))
    ]
    message = step_of([(70, 1), (3, 2), (64, 1)], [0, 1, 2, 3])
    kv = noise()
    for _ in range(2):
        logits, ids, _ = step(message, None, kv, draws)
        assert ids == kernels.draw(logits, draws) and len(set(ids)) > 1
    model.embedding[unpack(message).token_ids[1]] = torch.nan
    ids = step(message, None, kv.clone(), draws).ids
    assert ids[1:3] == [NOT_FINITE] * 2 and ids[0] >= 0 and ids[3] >= 0
    assert step(message, None, kv).ids == []


def test_two_models_step_at_the_same_time(kernels: Kernels) -> None:
    torch.set_num_threads(2)
    model = make_model(kernels, torch.bfloat16, bias=True, head_norm=True)
    message = step_of([(0, 20), (9, 1)], [19, 20])
    kv = noise()

    def steps(step: FusedStep) -> list[torch.Tensor]:
        torch.set_num_threads(2)
        own_kv = kv.clone()
        return [step(message, None, own_kv).logits.clone() for _ in range(30)]

    fused = [kernels.fuse(model), kernels.fuse(model)]
    with ThreadPoolExecutor(2) as pool:
        found = [logits for each in pool.map(steps, [step for step in fused if step]) for logits in each]
    assert len(found) == 60 and all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_add_up_inside_the_step(kernels: Kernels, threads: int) -> None:
    """Three ranks, here threads with different weights: the bits of single operators with sums between."""
    size, timeout_s = 3, 60.0
    library = build("native")
    memory = mmap.mmap(-1, memory_bytes(library, size))
    models = [
        replace(
            make_model(kernels, torch.bfloat16, bias=rank == 0, head_norm=False),
            embedding=torch.randn(VOCAB // size, HIDDEN).bfloat16(),
            first_id=rank * VOCAB // size,
            collective=SharedCollective(library, memory, rank=rank, size=size, timeout_s=timeout_s),
        )
        for rank in range(size)
    ]
    message = step_of([(0, 120), (9, 1)], [119, 120])
    kv = empty()

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_num_threads(threads)
        step = kernels.fuse(models[rank])
        assert step is not None
        fused = step(message, None, kv.clone()).logits
        return fused, one_by_one(kernels, models[rank], message, None, kv.clone())

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    for fused, single in found:
        assert torch.equal(fused, single)
    assert not torch.equal(found[0][0], found[1][0])  # other weights


def test_a_step_whose_peer_does_not_come_has_no_result(kernels: Kernels) -> None:
    library = build("native")
    memory = mmap.mmap(-1, memory_bytes(library, 2))
    alone = SharedCollective(library, memory, rank=0, size=2, timeout_s=0.2)
    step = kernels.fuse(
        replace(make_model(kernels, torch.bfloat16, bias=False, head_norm=False), collective=alone)
    )
    assert step is not None
    kv = empty()
    with pytest.raises(CollectiveFailed, match=r"rank 1 did not come to a collective within 0.2 s"):
        step(step_of([(0, 1)], [0]), None, kv)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, 3, "integers"),  # number of slices
        (6, 71, "add up"),  # longest context
        (7, 1, "integers"),  # parents
        (8, 1, "integers"),  # moves
        (9, 2, "add up"),  # a length
        (12, -1, "lengths"),  # a start
        (12, 2**31 - 1, "add up"),
        (15, VOCAB, r"token id outside 0 .. 299: \d+ .. 300"),
        (15, -1, "token id outside"),
        (17, NUM_BLOCKS, "block outside 0 .. 59"),
        (17, -1, "block outside"),
        (-1, 2, "logit row outside 0 .. 1: 0 .. 2"),
    ],
)
def test_a_bad_message_is_refused_before_anything_is_computed(
    kernels: Kernels, place: int, value: int, says: str
) -> None:
    step = kernels.fuse(make_model(kernels, torch.bfloat16, bias=False, head_norm=False))
    assert step is not None
    good = step_of([(69, 1), (3, 1)], [0, 1])
    values = array("i", good)
    values[place] = value
    kv = empty()
    with pytest.raises(ValueError, match=says):
        step(StepMessage(values.tobytes()), None, kv)
    with pytest.raises(ValueError, match="integers"):
        step(StepMessage(good[:-4]), None, kv)
    with pytest.raises(ValueError, match="a context of 70 tokens, turns are known up to 69"):
        step(good, turn_of(DIM, num_positions=69), kv)
    assert not kv.memory.any()


def test_cpus_without_packed_products_do_not_fuse() -> None:
    kernels = CpuKernels(build("x86-64"), torch.bfloat16)
    assert kernels.fuse(make_model(kernels, torch.bfloat16, bias=False, head_norm=False)) is None


def test_float32_is_not_fused() -> None:
    kernels = kernels_for(torch.device("cpu"), torch.float32)
    assert kernels.fuse(make_model(kernels, torch.float32, bias=False, head_norm=False)) is None
