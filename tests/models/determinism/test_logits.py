"""The logits of a text are the same bits whatever the number of ranks, chunks, mates and page size; and the
comparisons notice kernels of which that is not true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.determinism.controls import (
    attention_by_page,
    own_scales,
    rank_by_rank,
    torch_products,
)
from tests.models.determinism.exact_kernels import ExactKernels, put_on_grid
from tests.models.determinism.numpy_model import NumpyModel
from tests.models.determinism.thread_ranks import KernelSet, native, thread_ranks
from tests.models.oracle import Oracle
from tests.models.quantized_checkpoints import form, make
from tests.unit.kernels.builds import HAS_AVX512_BF16, TILE_BUILDS, build
from workers.kernels import Kernels, Quantization, TorchKernels
from workers.kernels.native import CpuKernels
from workers.model.checkpoint import Checkpoint
from workers.model.orders import orders_of_rank
from workers.quantizing.folder import quantize_folder

TEXT = checkpoints.prompt_ids(90)  # over a border of the key groups of attention
MATES = [checkpoints.prompt_ids(length, seed=length) for length in (1, 5, 16, 33, 41)]
LLAMA = checkpoints.family("llama")
DTYPES = (torch.float32, torch.bfloat16)
Folders = Callable[[str], Path]

# Changes of the llama family, with the group sizes it can be split into.
SHAPES: Mapping[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "copied KV heads": ({}, (1, 2, 4)),
    "9 heads over 3": ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, (1, 2, 3)),
    "5 KV heads": ({"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}, (1, 2, 3, 4)),
    "one KV head, biases": (
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "intermediate_size": 640},
        (1, 2, 4),
    ),
    "rows of several rounds": ({"hidden_size": 4096, "head_dim": 16}, (1, 2, 4)),
    "odd inner columns": ({"head_dim": 24, "intermediate_size": 97, "vocab_size": 129}, (1, 2, 4)),
    "odd inner columns, GELU": ({"hidden_act": "gelu", "intermediate_size": 97}, (1, 2, 4)),
}
FAMILIES: Mapping[str, tuple[int, ...]] = {
    "gpt2": (1, 2, 3, 4),
    "qwen2_sliding": (1, 2, 4),
    "qwen3": (1, 2),
    "mixtral": (1, 2, 4),
    "qwen3_moe": (1, 2, 4),
    "gemma2": (1, 2, 4),
    "olmo2": (1, 2, 4),
    "olmo2_uneven": (1, 2, 3),
    "olmo2_one_kv_head": (1, 2, 4),
    "gpt_neox": (1, 2, 3),
    "falcon_groups": (1, 2, 3),
}


def texts_of(
    folder: Path,
    size: int,
    dtype: torch.dtype,
    kernels: KernelSet = native,
    *,
    chunk: int | None,
    among: bool,
    block_size: int = 16,
    text: list[int] = TEXT,
    weights: str = "none",
    kv: str = "auto",
) -> torch.Tensor:
    """Logits of every token of `text`, alone or among the others."""
    with thread_ranks(folder, size, dtype, kernels, block_size=block_size, weights=weights, kv=kv) as ranks:
        model = ranks.paged()
        mates = [model.start(mate) for mate in MATES] if among else []
        subject = model.start(text)
        model.read([*mates[:3], subject, *mates[3:]], chunk)
        return torch.stack(subject.logits)


def check_all(
    folder: Path, sizes: tuple[int, ...], text: list[int] = TEXT, kernels: KernelSet = native
) -> None:
    for dtype in DTYPES:
        wanted = texts_of(folder, 1, dtype, kernels, chunk=None, among=False, text=text)
        for size in sizes:
            for chunk, among in ((None, size == 1), (7, True), (1, False)):
                found = texts_of(folder, size, dtype, kernels, chunk=chunk, among=among, text=text)
                assert torch.equal(found, wanted), (dtype, size, chunk, among)


@pytest.mark.parametrize("name", SHAPES)
def test_every_split(name: str, tmp_path: Path) -> None:
    overrides, sizes = SHAPES[name]
    check_all(checkpoints.build(tmp_path / "shape", LLAMA, seed=1, **overrides), sizes)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, family_folder: Folders) -> None:
    check_all(family_folder(name), FAMILIES[name], TEXT[:60])


@pytest.mark.skipif(not HAS_AVX512_BF16, reason="tiles are built beside AVX512-BF16")
@pytest.mark.parametrize("name", TILE_BUILDS)
def test_every_split_in_tiles(name: str, tmp_path: Path) -> None:
    """Those of AMX and those in software, in row-parallel products too: their leaves are whole tiles here."""
    folder = checkpoints.build(tmp_path / "shape", LLAMA, seed=1, head_dim=32, intermediate_size=512)
    orders = orders_of_rank(Checkpoint(folder).spec, 0, 4)
    assert orders is not None and (orders.output.part.grain, orders.down.part.grain) == (32, 128)
    check_all(folder, (1, 2, 4), kernels=lambda dtype: CpuKernels(build(name), dtype))


def check_form(folder: Path, sizes: tuple[int, ...], weights: str, kv: str, text: list[int] = TEXT) -> None:
    wanted = texts_of(folder, 1, torch.bfloat16, chunk=None, among=False, text=text, weights=weights, kv=kv)
    for size in sizes:
        found = texts_of(folder, size, torch.bfloat16, chunk=7, among=True, text=text, weights=weights, kv=kv)
        assert torch.equal(found, wanted), (weights, kv, size)


@pytest.mark.parametrize(("weights", "kv"), [("int8", "auto"), ("int4", "auto"), ("int4", "int8")])
@pytest.mark.parametrize("name", SHAPES)
def test_every_split_in_few_bits(name: str, weights: str, kv: str, tmp_path: Path) -> None:
    """Leaves that 32 divides and that it does not."""
    overrides, sizes = SHAPES[name]
    check_form(checkpoints.build(tmp_path / "shape", LLAMA, seed=1, **overrides), sizes, weights, kv)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_in_few_bits(name: str, weights: str, family_folder: Folders) -> None:
    check_form(family_folder(name), FAMILIES[name], weights, "int8", TEXT[:60])


@pytest.mark.parametrize("name", ["gptq", "gptq_asymmetric", "gptq_order", "gptq_8", "awq", "fp8_block"])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_checkpoints_in_few_bits(name: str, weights: str, family_folder: Folders, tmp_path: Path) -> None:
    """As the files have them, and in another form than they have."""
    folder = make(tmp_path, family_folder("llama"), form(name)).folder
    check_form(folder, (2, 4), weights, "auto", TEXT[:60])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_folder_quantized_before_has_the_bits_of_a_start_that_quantizes(
    weights: str, family_folder: Folders, tmp_path: Path
) -> None:
    source, out = (
        checkpoints.save(tmp_path / "half", Oracle(family_folder("llama")).model.to(torch.bfloat16)),
        tmp_path / "out",
    )
    quantize_folder(Checkpoint(source), Quantization(weights), out, lambda text: None)
    wanted = texts_of(source, 1, torch.bfloat16, chunk=None, among=False, weights=weights)
    for size in (1, 2, 4):
        for form_ in ("auto", weights):
            found = texts_of(out, size, torch.bfloat16, chunk=None, among=False, weights=form_)
            assert torch.equal(found, wanted), (size, form_)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_sums_rank_by_rank_are_noticed(family_folder: Folders, weights: str) -> None:
    folder = family_folder("llama")
    one, two = (
        texts_of(folder, size, torch.bfloat16, rank_by_rank, chunk=None, among=False, weights=weights)
        for size in (1, 2)
    )
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, two, atol=0.2, rtol=0)


def test_scales_of_a_rank_are_noticed(family_folder: Folders) -> None:
    folder = family_folder("llama")
    one, two = (
        texts_of(folder, size, torch.bfloat16, own_scales, chunk=None, among=False, weights="int8")
        for size in (1, 2)
    )
    assert not torch.equal(one, two)


def test_numpy_says_the_same(family_folder: Folders) -> None:
    wanted = torch.from_numpy(NumpyModel(family_folder("llama")).logits(TEXT)).float()
    found = texts_of(family_folder("llama"), 2, torch.float32, chunk=7, among=True)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    best = wanted.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 1e-3
    assert is_clear.sum() > 80 and torch.equal(found.argmax(1)[is_clear], wanted.argmax(1)[is_clear])


def test_page_size_is_not_felt(family_folder: Folders) -> None:
    """Attention takes its keys in groups that do not depend on it."""
    folder = family_folder("llama")
    for dtype in DTYPES:
        wanted = texts_of(folder, 1, dtype, chunk=None, among=False)
        for block_size in (1, 8, 32):
            assert torch.equal(
                texts_of(folder, 1, dtype, chunk=7, among=False, block_size=block_size), wanted
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_rank_by_rank_are_noticed(family_folder: Folders, dtype: torch.dtype) -> None:
    folder = family_folder("llama")
    one, two = (texts_of(folder, size, dtype, rank_by_rank, chunk=None, among=False) for size in (1, 2))
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, two, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)


def test_products_of_torch_are_noticed(family_folder: Folders) -> None:
    folder = family_folder("llama")
    whole, single = (
        texts_of(folder, 1, torch.float32, torch_products, chunk=chunk, among=False) for chunk in (None, 1)
    )
    assert not torch.equal(whole, single)
    torch.testing.assert_close(whole, single, atol=1e-4, rtol=0)


def test_attention_by_page_is_noticed(family_folder: Folders) -> None:
    """Pages of 8 and of 16 tokens."""
    folder = family_folder("llama")
    small, large = (
        texts_of(folder, 1, torch.float32, attention_by_page, chunk=None, among=False, block_size=block_size)
        for block_size in (8, 16)
    )
    assert not torch.equal(small, large)
    torch.testing.assert_close(small, large, atol=1e-4, rtol=0)


def exact(products: KernelSet) -> KernelSet:
    def make(dtype: torch.dtype) -> Kernels:
        return ExactKernels(products(dtype))

    return make


def test_exact_sums_are_equal_in_any_order(tmp_path: Path) -> None:
    folder = put_on_grid(checkpoints.build(tmp_path / "grid", LLAMA, seed=1))
    wanted = texts_of(folder, 1, torch.float32, exact(lambda _: TorchKernels()), chunk=None, among=False)
    assert wanted.unique().numel() > 500 and wanted.abs().max() < 1000
    for products in (native, rank_by_rank, torch_products):
        for size, chunk, block_size in ((1, 7, 8), (2, None, 16), (4, 16, 16), (2, 1, 8)):
            found = texts_of(
                folder,
                size,
                torch.float32,
                exact(products),
                chunk=chunk,
                among=True,
                block_size=block_size,
            )
            assert torch.equal(found, wanted), (size, chunk)
