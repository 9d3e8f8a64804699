"""The torch reference against arithmetic written out one element at a time."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.kernels.batches import make_batch, make_pool
from workers.kernels import LayerCache, TorchKernels

KERNELS = TorchKernels()


@pytest.mark.parametrize("window", [None, 1, 5])
def test_paged_attention_row_by_row(window: int | None) -> None:
    block_size, heads, kv_heads, dim = 4, 4, 2, 8
    batch = make_batch([(5, 1), (0, 9), (12, 3), (3, 1)], block_size, 20)
    pool = make_pool(20, kv_heads, block_size, dim, torch.float32)
    cache = pool.layers[1]
    q = torch.randn(14, heads, dim, generator=torch.Generator().manual_seed(0))
    found = KERNELS.paged_attention(q, cache, batch, 0.3, window)
    for s in range(4):
        for row in range(int(batch.query_starts[s]), int(batch.query_starts[s + 1])):
            last = int(batch.positions[row])
            seen = range(0 if window is None else max(0, last - window + 1), last + 1)
            pages = [(int(batch.block_tables[s, p // block_size]), p % block_size) for p in seen]
            for head in range(heads):
                keys = torch.stack([cache.keys[block, head // 2, offset] for block, offset in pages])
                values = torch.stack([cache.values[block, head // 2, offset] for block, offset in pages])
                wanted = (keys @ q[row, head] * 0.3).softmax(0) @ values
                torch.testing.assert_close(found[row, head], wanted, rtol=1e-5, atol=1e-5)


def test_rotary_turns_pairs_and_writes_slots() -> None:
    batch = make_batch([(3, 2)], 4, 6)
    pool = torch.zeros(6, 1, 1, 2, 4, 6)
    cache = LayerCache(keys=pool[:, :, 0, 0], values=pool[:, :, 0, 1])
    k = torch.arange(12.0).view(2, 1, 6)
    angles = torch.tensor([[0.5, 1.0], [2.0, 3.0]])  # the last two elements of a head stay
    q = KERNELS.rotary_and_write(k.clone(), k, k + 100, angles.cos(), angles.sin(), batch, cache)
    for token in range(2):
        x = k[token, 0].tolist()
        turned = list(x)
        for i in range(2):
            c, s = math.cos(angles[token, i]), math.sin(angles[token, i])
            turned[i], turned[i + 2] = x[i] * c - x[i + 2] * s, x[i + 2] * c + x[i] * s
        block, offset = int(batch.block_tables[0, (3 + token) // 4]), (3 + token) % 4
        torch.testing.assert_close(q[token, 0], torch.tensor(turned))
        torch.testing.assert_close(pool[block, 0, 0, 0, offset], torch.tensor(turned))
        assert torch.equal(pool[block, 0, 0, 1, offset], k[token, 0] + 100)
    assert int((pool.abs().sum(-1) > 0).sum()) == 4  # nothing else was written


def test_norms_and_activations() -> None:
    x = torch.tensor([[3.0, -4.0]])
    weight = torch.tensor([2.0, 0.5])
    root = math.sqrt((9 + 16) / 2 + 1e-6)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-6), torch.tensor([[6 / root, -2 / root]]))
    normed, total = KERNELS.add_rms_norm(x, torch.tensor([[1.0, 1.0]]), weight, 0.0)
    assert total.tolist() == [[4.0, -3.0]]
    torch.testing.assert_close(normed, KERNELS.rms_norm(total, weight, 0.0))
    silu = KERNELS.silu_mul(torch.tensor([[1.0, -2.0, 10.0, 3.0]]))
    torch.testing.assert_close(silu, torch.tensor([[10 / (1 + math.exp(-1)), -6 / (1 + math.exp(2))]]))
    gelu = 0.5 * 1.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (1.5 + 0.044715 * 1.5**3)))
    torch.testing.assert_close(KERNELS.gelu_new(torch.tensor([1.5])), torch.tensor([gelu]))


def test_linear_converts_its_result() -> None:
    linear = KERNELS.pack_linear(torch.eye(3).bfloat16(), torch.ones(3).bfloat16(), torch.float32)
    found = linear(torch.tensor([[1.0, 2.0, 3.0]]).bfloat16())
    assert found.dtype == torch.float32 and found.tolist() == [[2.0, 3.0, 4.0]]
