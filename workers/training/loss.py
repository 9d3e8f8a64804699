"""What all trainings make small: how far a guess is from the target's distribution."""

from __future__ import annotations

from typing import Any

import torch

_CHUNK = 256  # rows at a time: their logits stay in the processor's cache


def distance(
    features: torch.Tensor, head: torch.Tensor, places: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Mean over rows of the cross-entropy of softmax(head @ features) from a distribution that has `shares`
    at `places`; its gradient is that of the Kullback-Leibler divergence.

    features: (rows, hidden), the only ones with a gradient; head: (V', hidden); places, shares: (rows, few).
    Logits and their gradients are never there for all rows at once, which most of the time would go into
    moving. Products are computed in the head's dtype.
    """
    found: torch.Tensor = _Distance.apply(features, head, places, shares)  # type: ignore[no-untyped-call]
    return found


class _Distance(torch.autograd.Function):
    """The gradient is computed with the value, as the head is not trained."""

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, head: torch.Tensor, places: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros(())
        gradient = torch.empty(features.shape, dtype=torch.float32)
        for at in range(0, len(features), _CHUNK):
            rows = slice(at, at + _CHUNK)
            logits = (features[rows].to(head.dtype) @ head.T).float()
            norms = logits.logsumexp(dim=1)
            total += (norms - (logits.gather(1, places[rows]) * shares[rows]).sum(dim=1)).sum()
            excess = logits.sub_(norms[:, None]).exp_().scatter_add_(1, places[rows], -shares[rows])
            gradient[rows] = excess.to(head.dtype) @ head
        ctx.save_for_backward(gradient / len(features))
        return total / len(features)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return outer[0] * gradient, None, None, None
