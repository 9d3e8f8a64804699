"""Sums of inputs in one order: whole, in parts, through the products and collectives of every build."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.kernels.builds import PACKED, build
from workers.kernels.collective import SharedCollective, memory_bytes
from workers.kernels.native import CpuKernels
from workers.kernels.order import NodeOrder, SumOrder, balanced, divide, one_leaf
from workers.kernels.packed import NativeLinear, PaddedLinear, WeightFormat
from workers.kernels.reference import TorchPart
from workers.model.shares import share

CASES = [(leaves, size) for leaves in (1, 2, 3, 5, 6, 8, 9, 16, 24) for size in range(1, 9) if size <= leaves]


def tree(values: Sequence[str], joins: Sequence[int]) -> list[str]:
    """What is left of the values, written as sums."""
    sums: list[str] = []
    for value, count in zip(values, joins, strict=True):
        for _ in range(count):
            value = f"({sums.pop()}+{value})"
        sums.append(value)
    return sums


def even(num_leaves: int, width: int = 1) -> SumOrder:
    return balanced([one_leaf(width)] * num_leaves)


def shares(num_leaves: int, size: int) -> list[range]:
    return [share(num_leaves, rank, size) for rank in range(size)]


def test_halves_are_joined() -> None:
    assert tree("abcde", even(5).joins) == ["(((a+b)+c)+(d+e))"]
    heads = balanced([balanced([one_leaf(8)] * 3)] * 3)  # 9 query heads over 3 KV heads
    assert tree("abcdefghi", heads.joins) == ["((((a+b)+c)+((d+e)+f))+((g+h)+i))"]
    assert heads.widths == (8,) * 9 and heads.num_nodes == 1 and heads.grain == 8


@pytest.mark.parametrize(("num_leaves", "size"), CASES)
def test_ranks_make_the_tree_of_one(num_leaves: int, size: int) -> None:
    whole = even(num_leaves)
    leaves = [str(leaf) for leaf in range(num_leaves)]
    parts, nodes = divide(whole, shares(num_leaves, size))
    held = [
        tree(leaves[rank.start : rank.stop], part.joins)
        for rank, part in zip(shares(num_leaves, size), parts, strict=True)
    ]
    assert [part.num_nodes for part in parts] == [len(sums) for sums in held] == list(nodes.counts)
    assert tree([node for sums in held for node in sums], nodes.joins) == tree(leaves, whole.joins)
    if num_leaves % size == 0 and size in (1, 2, 4, 8):
        assert set(nodes.counts) == {1}


Part = NativeLinear | PaddedLinear


def leafwise(kernels: CpuKernels, x: torch.Tensor, weight: torch.Tensor, order: SumOrder) -> torch.Tensor:
    """The nodes, each leaf by a product of its own and joined by torch."""
    sums: list[torch.Tensor] = []
    columns = zip(x.split(order.widths, 1), weight.split(order.widths, 1), order.joins, strict=True)
    for row, column, joins in columns:
        leaf = SumOrder((row.shape[1],), (0,), order.grain)
        total = kernels.pack_linear(column.contiguous(), None, torch.float32, order=leaf)(row)
        for _ in range(joins):
            total = sums.pop() + total
        sums.append(total)
    return torch.stack(sums)


ORDERS = {
    "even": even(16, 24),
    "tiles": even(9, 64),
    "nested": balanced([balanced([one_leaf(20)] * 3)] * 3),
    "one": one_leaf(2112),
    "long": balanced([one_leaf(1100), one_leaf(2), one_leaf(500)]),
    "odd end": balanced([one_leaf(32)] * 4 + [one_leaf(31)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_products_follow_the_order(name: str, dtype: torch.dtype, order: SumOrder) -> None:
    kernels = CpuKernels(build(name), dtype)
    weight = torch.randn(70, order.num_inputs).to(dtype)
    bias, x = torch.randn(70).to(dtype), torch.randn(130, order.num_inputs).to(dtype)
    (wanted,) = leafwise(kernels, x, weight, order)
    whole = kernels.pack_linear(weight, bias, None, order=order)
    part = kernels.pack_part(weight, weight.dtype, order)
    for rows in (0, 1, 6, 7, 17, 96, 130):
        assert torch.equal(part.nodes(x[:rows])[0], wanted[:rows]), rows
        assert torch.equal(whole(x[:rows]), (wanted + bias.float()).to(dtype)[:rows]), rows
    single = kernels.pack_linear(weight, None, torch.float32)(x)
    assert torch.equal(single, wanted) == (len(order.widths) == 1)  # the order is felt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_give_the_bits_of_one(name: str, dtype: torch.dtype, size: int) -> None:
    """Weights, products and collective; three ranks have several nodes each."""
    kernels, order = CpuKernels(build(name), dtype), even(16, 32)
    weight, bias = torch.randn(600, order.num_inputs).to(dtype), torch.randn(600)
    x = torch.randn(180, order.num_inputs).to(dtype)
    wanted = kernels.pack_linear(weight, bias, None, order=order)(x)
    spans, (parts, nodes) = shares(16, size), divide(order, shares(16, size))

    def work(collective: SharedCollective, rank: int) -> list[torch.Tensor]:
        columns = slice(spans[rank].start * 32, spans[rank].stop * 32)
        held = kernels.pack_part(weight[:, columns], dtype, parts[rank])
        found = [held.nodes(x[:rows, columns]) for rows in (0, 1, 180)]
        return [collective.join(each, nodes, bias, dtype) for each in found]

    for found in in_threads(name, size, work):
        assert all(torch.equal(each, wanted[: len(each)]) for each in found)


def test_tiles_are_for_leaves_of_whole_tiles() -> None:
    """On every rank alike, whatever its own leaves are."""
    if PACKED[-1] != "software-tiles":
        pytest.skip("tiles are built beside AVX512-BF16")
    kernels, weight = CpuKernels(build(PACKED[-1]), torch.bfloat16), torch.randn(8, 96).bfloat16()
    (first, second), _ = divide(
        balanced([one_leaf(width) for width in (96, 48, 48)]), [range(1), range(1, 3)]
    )
    for order, form in (
        (even(3, 32), WeightFormat.BF16_TILES),
        (first, WeightFormat.BF16_PAIRS),
        (second, WeightFormat.BF16_PAIRS),
    ):
        part = kernels.pack_part(weight, weight.dtype, order)
        assert isinstance(part, NativeLinear) and part.format is form


def test_torch_has_the_same_nodes_nearly() -> None:
    order = ORDERS["nested"]
    part, _ = divide(order, [range(2), range(2, 9)])
    weight, x = torch.randn(70, order.num_inputs)[:, 40:], torch.randn(9, order.num_inputs)[:, 40:]
    found = TorchPart(weight, part[1]).nodes(x)
    kernels = CpuKernels(build("native"), torch.float32)
    torch.testing.assert_close(found, leafwise(kernels, x, weight, part[1]))


def in_threads(
    name: str, size: int, work: Callable[[SharedCollective, int], list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    library = build(name)
    memory = mmap.mmap(-1, memory_bytes(library, size))

    def run(rank: int) -> list[torch.Tensor]:
        collective = SharedCollective(library, memory, rank=rank, size=size, timeout_s=20.0)
        return work(collective, rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_nodes_of_ranks_in_another_number_are_refused() -> None:
    def work(collective: SharedCollective, rank: int) -> list[torch.Tensor]:
        with pytest.raises(AssertionError):
            collective.join(torch.ones(2, 1, 4), NodeOrder((1, 1), (0, 1)), None, torch.float32)
        return []

    in_threads("native", 2, work)
