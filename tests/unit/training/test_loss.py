from __future__ import annotations

import torch

from workers.training.loss import distance, draw_tokens

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


def test_some_tokens_stand_for_all() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, HIDDEN, generator=draw, requires_grad=True)
    head = torch.randn(400, HIDDEN, generator=draw) / 2
    places = torch.randint(0, 30, (ROWS, 3), generator=draw)
    shares = torch.randn(ROWS, 3, generator=draw).softmax(dim=1)
    expected = distance(features, head, places, shares)
    (wanted,) = torch.autograd.grad(expected, features)
    everything = draw_tokens(head, places, 400, draw)
    assert sorted(everything.head.tolist()) == sorted(head.tolist()) and not everything.log_weights.any()
    found, gradients = [], []
    for _ in range(30):
        some = draw_tokens(head, places, 90, draw)
        assert len(some.head) == 120 and torch.equal(some.head[some.places], head[places])
        estimate = distance(features, some.head, some.places, shares, some.log_weights)
        gradients.append(torch.autograd.grad(estimate, features)[0])
        found.append(estimate.item())
    assert abs(sum(found) / len(found) - expected.item()) < 0.02
    assert float((torch.stack(gradients).mean(0) - wanted).norm() / wanted.norm()) < 0.1
