"""What all trainings make small: how far a guess is from the target's distribution."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

_CHUNK = 256  # rows at a time: their logits stay in the processor's cache


class SomeTokens(NamedTuple):
    """Tokens that stand for all of a vocabulary, each for as many as `weights` says."""

    head: torch.Tensor  # (some, hidden)
    places: torch.Tensor  # as places in it
    log_weights: torch.Tensor  # (some,)


def draw_tokens(
    head: torch.Tensor, places: torch.Tensor, count: int, generator: torch.Generator
) -> SomeTokens:
    """All tokens of `places`, and `count` of the others, drawn alike, which stand for all of those: the sum
    over the vocabulary below a softmax is right on average (Bengio and Senecal, 2003)."""
    is_wanted = torch.zeros(len(head), dtype=torch.bool)
    is_wanted[places.reshape(-1)] = True
    wanted, others = is_wanted.nonzero()[:, 0], (~is_wanted).nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), generator=generator)[:count]]
    chosen = torch.cat((wanted, drawn))
    where = torch.full((len(head),), -1)
    where[chosen] = torch.arange(len(chosen))
    log_weights = torch.zeros(len(chosen))
    log_weights[len(wanted) :] = math.log(len(others) / max(1, len(drawn))) if len(others) else 0.0
    return SomeTokens(head[chosen], where[places], log_weights)


def distance(
    features: torch.Tensor,
    head: torch.Tensor,
    places: torch.Tensor,
    shares: torch.Tensor,
    log_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over rows of the cross-entropy of softmax(head @ features) from a distribution that has `shares`
    at `places`; its gradient is that of the Kullback-Leibler divergence.

    features: (rows, hidden), the only ones with a gradient; head: (V', hidden); places, shares: (rows, few).
    log_weights: (V',), of how many tokens each one stands for; None: for itself.
    Logits and their gradients are never there for all rows at once, which most of the time would go into
    moving. Products are computed in the head's dtype.
    """
    weights = torch.zeros(len(head)) if log_weights is None else log_weights
    found: torch.Tensor = _Distance.apply(features, head, places, shares, weights)  # type: ignore[no-untyped-call]
    return found


class _Distance(torch.autograd.Function):
    """The gradient is computed with the value, as the head is not trained."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        head: torch.Tensor,
        places: torch.Tensor,
        shares: torch.Tensor,
        log_weights: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros(())
        gradient = torch.empty(features.shape, dtype=torch.float32)
        for at in range(0, len(features), _CHUNK):
            rows = slice(at, at + _CHUNK)
            logits = (features[rows].to(head.dtype) @ head.T).float()
            told = (logits.gather(1, places[rows]) * shares[rows]).sum(dim=1)
            norms = logits.add_(log_weights).logsumexp(dim=1)
            total += (norms - told).sum()
            excess = logits.sub_(norms[:, None]).exp_().scatter_add_(1, places[rows], -shares[rows])
            gradient[rows] = excess.to(head.dtype) @ head
        ctx.save_for_backward(gradient / len(features))
        return total / len(features)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return outer[0] * gradient, None, None, None, None
