"""The optimisation of all trainings: AdamW (Loshchilov and Hutter, 2019), a warm-up, a cosine to zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.progress import Progress

_BETAS = (0.9, 0.95)
_WARM_UP = 0.05  # share of the steps
_MAX_NORM = 1.0  # of the gradient
_REPORTS = 40  # lines of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How long and how fast."""

    epochs: int
    learning_rate: float  # the highest
    batch: int  # what a step has of: rows or texts
    seed: int  # of the order


def fit(
    parameters: Iterable[torch.nn.Parameter],
    loss_of: Callable[[Sequence[int]], torch.Tensor],
    count: int,
    options: FitOptions,
    progress: Progress,
) -> list[float]:
    """Changes `parameters` in place, so that the mean of `loss_of` over batches of range(count) falls.

    Returns the loss of each step. The same for the same arguments and number of threads."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=_BETAS, weight_decay=0.0)
    num_steps = options.epochs * math.ceil(count / options.batch)
    warm_up = max(1, round(_WARM_UP * num_steps))
    losses: list[float] = []
    for step, batch in enumerate(_batches(count, options)):
        share = min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * share
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        torch.nn.utils.clip_grad_norm_(trained, _MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % max(1, num_steps // _REPORTS) == 0:
            recent = losses[-max(1, num_steps // _REPORTS) :]
            progress.start(f"step {step} of {num_steps}, loss {sum(recent) / len(recent):.3f}")
    return losses


def _batches(count: int, options: FitOptions) -> Iterator[Sequence[int]]:
    """Each of range(count) once an epoch, in an order of its own."""
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.epochs):
        for batch in torch.split(torch.randperm(count, generator=generator), options.batch):
            yield batch.tolist()
