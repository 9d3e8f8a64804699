"""The C++ kernels against their torch reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.batches import make_batch, make_pool
from tests.unit.kernels.builds import HAS_AVX512_BF16, MARCHES, PACKED, build
from workers.kernels import Kernels, LayerCache, TorchKernels, kernels_for
from workers.kernels.native import CpuKernels
from workers.kernels.packed import NativeLinear

REFERENCE = TorchKernels()
DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
MIXES = [
    [(0, 1)],
    [(0, 7)],
    [(5, 1), (200, 1), (63, 1), (64, 1)],
    [(0, 40), (129, 1), (30, 17), (0, 1)],
    [(100, 70)],
]


@pytest.fixture(params=[(march, dtype) for march in MARCHES for dtype in DTYPES], ids=str)
def kernels(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    march, dtype = request.param
    return CpuKernels(build(march), dtype), dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_machine_with_a_compiler_gets_them(dtype: torch.dtype) -> None:
    assert isinstance(kernels_for(CPU, dtype), CpuKernels)


def test_packed_products_need_avx2_and_quantized_ones_avx512_bf16() -> None:
    assert {march for march in MARCHES if build(march).has_linear} == set(MARCHES) & set(PACKED)
    assert [march for march in MARCHES if build(march).has_quantized] == ["native"] * HAS_AVX512_BF16


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within two units in the last place of bfloat16, or 2e-5 in float32."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    tolerance = 2e-5 if found.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (1, 576), (3, 37), (130, 576), (5, 3, 64), (2, 0, 8)])
def test_rms_norm(kernels: tuple[Kernels, torch.dtype], shape: tuple[int, ...]) -> None:
    own, dtype = kernels
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert_close(own.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_rms_norm_reads_heads_of_a_fused_row(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    fused, weight = torch.randn(4, 10 * 24).to(dtype), torch.randn(24).to(dtype)
    heads = fused[:, 24 : 24 * 4].view(4, 3, 24)
    assert_close(own.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads.clone(), weight, 1e-6))


@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (3, 37), (200, 576)])
def test_add_rms_norm(kernels: tuple[Kernels, torch.dtype], shape: tuple[int, int]) -> None:
    own, dtype = kernels
    x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
    wanted = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-5)
    found = own.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert_close(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 74), (70, 3072)])
def test_activations(kernels: tuple[Kernels, torch.dtype], shape: tuple[int, int]) -> None:
    own, dtype = kernels
    x = (torch.randn(shape) * 8).to(dtype)
    assert_close(own.silu_mul(x), REFERENCE.silu_mul(x))
    for name in ("silu", "gelu", "gelu_new"):
        assert_close(getattr(own, name)(x), getattr(REFERENCE, name)(x))
    large = torch.tensor([[-3e38, 3e38, -100.0, 100.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    assert_close(own.silu_mul(large), REFERENCE.silu_mul(large))
    assert_close(own.silu(large), REFERENCE.silu(large))
    assert_close(own.gelu(large), REFERENCE.gelu(large.double()).to(dtype))


def test_layer_norm(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    x, weight, bias = (torch.randn(s).to(dtype) for s in ((5, 48), (48,), (48,)))
    assert_close(own.layer_norm(x, weight, bias, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("rotary", [None, 16, 24])
@pytest.mark.parametrize("mix", [[], *MIXES])
def test_rotary_and_write(
    kernels: tuple[Kernels, torch.dtype], rotary: int | None, mix: list[tuple[int, int]]
) -> None:
    own, dtype = kernels
    heads, kv_heads, dim, block_size = 6, 2, 24, 8
    batch = make_batch(mix, block_size, 60)
    tokens = batch.positions.shape[0]
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    angles = None if rotary is None else torch.rand(tokens, rotary // 2) * 6
    cos, sin = (None, None) if angles is None else (angles.cos(), angles.sin())
    results = []
    for each in (own, REFERENCE):
        pool = make_pool(60, kv_heads, block_size, dim, dtype)
        q, k, v = fused.clone().split([heads, kv_heads, kv_heads], dim=1)
        turned = each.rotary_and_write(q, k, v, cos, sin, batch, pool.layers[1])
        results.append((turned, pool.numbers))
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 8, 32), (8, 1, 80, 8), (7, 1, 40, 5), (2, 2, 7, 3)],
)
def test_paged_attention(
    kernels: tuple[Kernels, torch.dtype],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    mix: list[tuple[int, int]],
    window: int | None,
) -> None:
    own, dtype = kernels
    batch = make_batch(mix, block_size, 120)
    pool = make_pool(120, kv_heads, block_size, dim, dtype)
    q = torch.randn(batch.positions.shape[0], heads + 1, dim).to(dtype)[:, :heads]
    cache = pool.layers[1]
    found = own.paged_attention(q, cache, batch, dim**-0.5, window)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, dim**-0.5, window))


@pytest.mark.parametrize("cap", [0.7, 4.0])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(9, 3, 64, 16), (7, 1, 40, 5), (2, 2, 7, 3)]
)
def test_capped_scores(
    kernels: tuple[Kernels, torch.dtype],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    cap: float,
) -> None:
    """As Gemma 2 has them: scores from far below the cap to far beyond it."""
    own, dtype = kernels
    for mix in MIXES:
        batch = make_batch(mix, block_size, 120)
        cache = make_pool(120, kv_heads, block_size, dim, dtype).layers[1]
        q = 2 * torch.randn(batch.positions.shape[0], heads, dim)
        q[::3] /= 100
        found = own.paged_attention(q.to(dtype), cache, batch, dim**-0.5, window, cap)
        wanted = REFERENCE.paged_attention(q.to(dtype), cache, batch, dim**-0.5, window, cap)
        tolerance = 1e-4 if dtype == torch.float32 else 2.5e-2  # larger scores than elsewhere
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_attention_of_more_heads_than_a_tile(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch, pool = make_batch([(0, 3), (20, 1)], 16, 8), make_pool(8, 1, 16, 16, dtype)
    q = torch.randn(4, 100, 16).to(dtype)
    cache = pool.layers[0]
    assert_close(
        own.paged_attention(q, cache, batch, 0.25, None),
        REFERENCE.paged_attention(q, cache, batch, 0.25, None),
    )


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("start", [3, 70])
def test_attention_reads_nothing_past_the_context(
    kernels: tuple[Kernels, torch.dtype], start: int, dim: int
) -> None:
    _, dtype = kernels
    batch, clean = make_batch([(start, 2), (0, 1)], 16, 8), make_pool(8, 2, 16, dim, dtype)
    dirty = clean.clone()
    dirty.memory.fill_(0xFF)  # a NaN in every format
    for s, length in enumerate(batch.context_lens.tolist()):
        for position in range(length):
            block, offset = int(batch.block_tables[s, position // 16]), position % 16
            dirty.numbers[block, :, :, :, offset] = clean.numbers[block, :, :, :, offset]
    q = torch.randn(3, 4, dim).to(dtype)
    for each in (kernels[0], REFERENCE):
        found, wanted = (each.paged_attention(q, pool.layers[0], batch, 0.2, None) for pool in (dirty, clean))
        assert torch.equal(found, wanted)


def test_a_broken_key_or_query_is_not_hidden(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch, pool = make_batch([(20, 1), (20, 1), (20, 1)], 16, 8), make_pool(8, 1, 16, 16, dtype)
    q = torch.randn(3, 2, 16).to(dtype)
    pool.layers[0].keys[int(batch.block_tables[0, 0]), 0, 5, 3] = float("nan")
    q[1, 1, 0] = float("nan")
    found = own.paged_attention(q, pool.layers[0], batch, 0.25, None)
    assert found.isnan().all(-1).tolist() == [[True, True], [False, True], [False, False]]
    assert found[2].isfinite().all()


def test_pools_beyond_two_to_the_31_elements(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    heads, dim, block_size = 2, 16, 16
    stride = 1 << 27  # elements; the pages in between are never touched, so never resident
    space = torch.empty(20 * stride, dtype=dtype)
    large = space.as_strided((20, heads, 1, 2, block_size, dim), (stride, 512, 512, 256, dim, 1))
    batch, pool = (
        make_batch([(16, 9)], block_size, 20),
        make_pool(20, heads, block_size, dim, dtype).numbers[:, :, :1],
    )
    batch.block_tables[0] = torch.tensor([19, 17])
    batch = replace(batch, slots=17 * block_size + torch.arange(9))
    q, k, v = torch.randn(9, 3 * heads, dim).to(dtype).split(heads, dim=1)
    large[[19, 17]] = pool[[19, 17]]
    found = []
    for each in (large, pool):
        cache = LayerCache(keys=each[:, :, 0, 0], values=each[:, :, 0, 1])
        own.rotary_and_write(q, k, v, None, None, batch, cache)
        found.append(own.paged_attention(q, cache, batch, 0.25, None))
    assert torch.equal(*found)
    assert torch.equal(large[17], pool[17])


def test_wrong_dtypes_and_shapes_are_refused(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    batch, pool = make_batch([(0, 2)], 16, 8), make_pool(8, 1, 16, 16, dtype)
    cache = pool.layers[0]
    q, k = torch.randn(2, 2, 16).to(dtype), torch.randn(2, 1, 16).to(dtype)
    wide = torch.ones(2, 9)  # turns 18 elements of 16
    calls: list[Callable[[], object]] = [
        lambda: own.rms_norm(q, torch.ones(15, dtype=dtype), 1e-5),
        lambda: own.silu_mul(q.to(other)),
        *(lambda f=f: f(q.to(other)) for f in (own.silu, own.gelu, own.gelu_new)),
        lambda: own.paged_attention(q.to(other), cache, batch, 1.0, None),
        lambda: own.paged_attention(q[:1], cache, batch, 1.0, None),
        lambda: own.rotary_and_write(q, k, k.to(other), None, None, batch, cache),
        lambda: own.rotary_and_write(q, k, k, wide, wide, batch, cache),
        lambda: own.rotary_and_write(q, k, k, wide[:, :8].bfloat16(), wide[:, :8].bfloat16(), batch, cache),
    ]
    linear = own.pack_linear(torch.randn(8, 16).to(dtype))
    if isinstance(linear, NativeLinear) and dtype == torch.bfloat16:
        calls += [lambda: linear(torch.ones(1, 14).to(dtype)), lambda: linear(torch.ones(1, 16))]
    for call in calls:
        with pytest.raises((AssertionError, RuntimeError)):
            call()


def test_attention_without_rows(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch, pool = make_batch([], 16, 8), make_pool(8, 1, 16, 16, dtype)
    q = torch.empty(0, 4, 16, dtype=dtype)
    assert own.paged_attention(q, pool.layers[0], batch, 0.25, None).shape == (0, 4, 16)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (7, 1, 64), (8, 1, 32), (9, 1, 64), (2, 2, 96), (6, 3, 80)]
)
def test_attention_row_knows_neither_neighbours_nor_cuts(
    kernels: tuple[Kernels, torch.dtype], heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    own, dtype = kernels
    pool = make_pool(120, kv_heads, 16, dim, dtype)
    cache = pool.layers[2]
    q = torch.randn(150, heads, dim).to(dtype)
    whole = make_batch([(0, 150)], 16, 120)
    wanted = own.paged_attention(q, cache, whole, 0.125, window)
    for start, stop in [(0, 1), (0, 33), (33, 100), (100, 102), (102, 149), (149, 150)]:
        piece = make_batch([(start, stop - start)], 16, 120)
        assert torch.equal(piece.block_tables[0], whole.block_tables[0, : piece.block_tables.shape[1]])
        found = own.paged_attention(q[start:stop], cache, piece, 0.125, window)
        assert torch.equal(found, wanted[start:stop])


LINEARS = [
    (64, 2, False),
    (1, 64, True),
    (960, 576, False),
    (50, 1536, True),
    (130, 74, True),
    (192, 4100, False),
]


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 13, 97, 200])
@pytest.mark.parametrize(("out_features", "in_features", "has_bias"), LINEARS)
def test_linear(
    kernels: tuple[Kernels, torch.dtype], rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    own, dtype = kernels
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    x = torch.randn(rows, in_features + 6).to(dtype)[:, :in_features]
    for out_dtype in (dtype, torch.float32):
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        linear = own.pack_linear(weight, bias, out_dtype)
        found, wanted = linear(x), exact.to(out_dtype)
        if not isinstance(linear, NativeLinear):  # torch rounds to the weight's dtype first
            assert found.dtype == out_dtype
            found, wanted = found.to(dtype), wanted.to(dtype)
        assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PACKED)
def test_linear_row_knows_no_neighbours(name: str, dtype: torch.dtype) -> None:
    own = CpuKernels(build(name), dtype)
    weight = torch.randn(960, 576).to(dtype)
    linear = own.pack_linear(weight)
    x = torch.randn(300, 576).to(dtype)
    wanted = linear(x)
    for rows in (1, 2, 3, 5, 8, 64, 97):
        assert torch.equal(linear(x[:rows]), wanted[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PACKED)
def test_linear_column_knows_no_place(name: str, dtype: torch.dtype) -> None:
    """Ranks hold other columns beside it, and other numbers of them."""
    own = CpuKernels(build(name), dtype)
    weight, x = torch.randn(300, 130).to(dtype), torch.randn(20, 130).to(dtype)
    wanted = own.pack_linear(weight, None, torch.float32)(x)
    for start, stop in ((0, 1), (1, 66), (64, 128), (77, 300), (130, 260)):
        part = own.pack_linear(weight[start:stop].contiguous(), None, torch.float32)
        assert torch.equal(part(x), wanted[:, start:stop])


@pytest.mark.parametrize("size", [1, 7, 16, 37, 96])
def test_elements_know_no_place_in_their_row(kernels: tuple[Kernels, torch.dtype], size: int) -> None:
    """A rank's row is a piece of another's: vectors begin elsewhere."""
    own, dtype = kernels
    gate, up = torch.randn(5, 200).to(dtype) * 4, torch.randn(5, 200).to(dtype)
    silu = own.silu_mul(torch.cat((gate, up), 1))
    for start in (0, 3, 100, 200 - size):
        cut = slice(start, start + size)
        assert torch.equal(own.silu_mul(torch.cat((gate[:, cut], up[:, cut]), 1)), silu[:, cut])
        for alone in (own.silu, own.gelu, own.gelu_new):
            assert torch.equal(alone(gate[:, cut]), alone(gate)[:, cut])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 32), (6, 3, 80), (4, 2, 24)])
def test_attention_head_knows_no_other(
    kernels: tuple[Kernels, torch.dtype], heads: int, kv_heads: int, dim: int
) -> None:
    """Ranks hold some KV heads, or some query heads of one."""
    own, dtype = kernels
    pool = make_pool(40, kv_heads, 16, dim, dtype)
    batch = make_batch([(0, 100), (150, 1), (64, 3)], 16, 40)
    q = torch.randn(104, heads, dim).to(dtype)
    wanted = own.paged_attention(q, pool.layers[2], batch, 0.125, None)
    group = heads // kv_heads
    for head in range(kv_heads):
        one = slice(head, head + 1)
        cache = LayerCache(keys=pool.layers[2].keys[:, one], values=pool.layers[2].values[:, one])
        for first, last in ((0, group), (0, group // 2), (group // 2, group)):
            cut = slice(head * group + first, head * group + last)
            if last > first:
                found = own.paged_attention(q[:, cut].contiguous(), cache, batch, 0.125, None)
                assert torch.equal(found, wanted[:, cut])


def test_two_threads_give_the_bits_of_one(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch = make_batch([(0, 150), (40, 1), (90, 1)], 16, 120)
    x, weight = torch.randn(152, 576).to(dtype), torch.randn(576).to(dtype)
    linear = own.pack_linear(torch.randn(15 * 64, 576).to(dtype) / 24)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pool = make_pool(120, 3, 16, 64, dtype)
        cache = pool.layers[1]
        q, k, v = own.rms_norm(x, weight, 1e-5).view(152, 9, 64).repeat(1, 2, 1)[:, :15].split([9, 3, 3], 1)
        q = own.rotary_and_write(q, k, v, x[:, :32].float(), x[:, 32:64].float(), batch, cache)
        attended = own.paged_attention(q, cache, batch, 0.125, None)
        found.append(
            (own.silu_mul(linear(x)) if dtype == torch.bfloat16 else own.silu_mul(x), attended, pool.numbers)
        )
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_one_openmp_runtime() -> None:
    kernels_for(CPU, torch.float32)
    with open("/proc/self/maps") as file:
        runtimes = {line.split()[-1] for line in file if "omp" in line.rsplit("/", 1)[-1]}
    assert len(runtimes) == 1
