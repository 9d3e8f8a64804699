from __future__ import annotations

import torch

from workers.training.loss import distance

ROWS, HIDDEN, VOCAB = 600, 8, 12  # more rows than are computed at a time


def test_value_and_gradient_are_those_of_the_plain_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, HIDDEN, generator=draw, requires_grad=True)
    head = torch.randn(VOCAB, HIDDEN, generator=draw)
    places = torch.stack([torch.randperm(VOCAB, generator=draw)[:3] for _ in range(ROWS)])
    shares = torch.randn(ROWS, 3, generator=draw).softmax(dim=1)
    target = torch.zeros(ROWS, VOCAB).scatter(1, places, shares)
    expected = -(target * (features @ head.T).log_softmax(dim=1)).sum(dim=1).mean()
    (wanted,) = torch.autograd.grad(2 * expected, features)
    found = distance(features, head, places, shares)
    (gradient,) = torch.autograd.grad(2 * found, features)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-7)
