"""The least time that physics leaves for a step: reading at the read rate, or products at the matrix rate.

Memory: all matrices once a step, of experts those that its tokens are likely to choose, and the keys and
values of the contexts. Products: two operations a weight and token, the head only for rows whose logits are
wanted, attention over what is attended to. Nothing is counted for the traffic between ranks, so that a limit
is never too low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.figures.number_formats import element_bytes
from cluster.figures.step_cost import StepCost
from cluster.plan.arithmetic import (
    PLAIN,
    attended_pairs,
    attended_tokens,
    expert_bytes,
    head_flop,
    kv_bytes_per_token,
    linear_flop,
    pair_flop,
    read_bytes,
)
from cluster.plan.devices import Device, Roofs
from workers.kv_format import kv_dtype
from workers.model.architecture import ModelSpec
from workers.weight_forms import Quantization, WeightForms

_QUANTIZED_SPEEDUP = 2.0  # an instruction of 8-bit products has twice as many as one of bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step needs, whoever computes it."""

    read_bytes: float
    flop: float  # of bfloat16: of products that are twice as fast, half as many

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flop / self.read_bytes

    def seconds(self, roofs: Roofs | Device) -> float:
        """At best: the longer of the two, perfectly overlapped."""
        return max(self.read_bytes / roofs.read_bytes_per_s, self.flop / roofs.flop_per_s)

    def is_bandwidth_bound(self, roofs: Roofs | Device) -> bool:
        return self.read_bytes / roofs.read_bytes_per_s >= self.flop / roofs.flop_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A model in the form in which it runs: bytes of all its matrices, and of a token's keys and values."""

    spec: ModelSpec
    weight_bytes: float  # read once a step of many tokens
    expert_bytes: float  # of these, what belongs to experts
    kv_bytes: int  # of a token
    speedup: float = 1.0  # of products with weights over bfloat16 ones; attention is not quantized

    @classmethod
    def of(
        cls, spec: ModelSpec, *, dtype: str = "bfloat16", cache: str = "auto", forms: WeightForms = PLAIN
    ) -> Load:
        """dtype: as `model.dtype`, of weights that are not quantized; cache: as `cache.dtype`."""
        element = element_bytes(dtype)
        return cls(
            spec=spec,
            weight_bytes=read_bytes(spec, element_bytes=element, forms=forms),
            expert_bytes=expert_bytes(spec, element_bytes=element, forms=forms),
            kv_bytes=kv_bytes_per_token(spec, dtype=kv_dtype(cache, dtype)),
            speedup=1.0 if forms.layers is Quantization.NONE else _QUANTIZED_SPEEDUP,
        )

    def read_weight_bytes(self, tokens: int) -> float:
        """In a step of so many tokens. None of them goes through the share (1 - k/E)^tokens of the experts,
        when each token's choice is as good as random."""
        if self.spec.experts is None:
            return self.weight_bytes
        return self.weight_bytes - self.expert_bytes * (1 - self.spec.experts.share_per_token) ** tokens

    def decode(self, batch: int, context: int) -> Work:
        """One token for each of `batch` sequences of `context` tokens."""
        seen = batch * attended_tokens(self.spec, context)
        products = (linear_flop(self.spec, batch) + head_flop(self.spec, batch)) / self.speedup
        return Work(
            read_bytes=self.read_weight_bytes(batch) + seen * self.kv_bytes,
            flop=products + seen * pair_flop(self.spec),
        )

    def prefill(self, tokens: int, cached: int = 0) -> Work:
        """`tokens` new ones of a prompt in one step, up to the logits of the last."""
        attention = attended_pairs(self.spec, tokens, cached) * pair_flop(self.spec)
        products = (linear_flop(self.spec, tokens) + head_flop(self.spec)) / self.speedup
        return Work(
            read_bytes=self.read_weight_bytes(tokens) + attended_tokens(self.spec, cached) * self.kv_bytes,
            flop=products + attention,
        )

    def turning_batch(self, roofs: Roofs | Device, context: int = 0) -> float:
        """Batch from which a decode step is bound by products; inf where every further sequence brings more
        reading of its keys and values than products."""
        weights_s = self.weight_bytes / roofs.read_bytes_per_s  # so many tokens choose all experts
        per_row_read = attended_tokens(self.spec, context) * self.kv_bytes / roofs.read_bytes_per_s
        per_row_flop = self.decode(1, context).flop / roofs.flop_per_s
        if per_row_flop <= per_row_read:
            return math.inf
        return weights_s / (per_row_flop - per_row_read)

    def step_cost(self, device: Device, *, efficiency: float = 1.0) -> StepCost:
        """Of steps of one rank that reach this share of the ceilings."""
        read = device.read_bytes_per_s * efficiency
        flop = device.flop_per_s * efficiency
        products = flop * self.speedup
        pair = pair_flop(self.spec) / flop
        return StepCost(
            overhead_s=0.0,
            weights_s=self.weight_bytes / read,
            token_s=linear_flop(self.spec, 1) / products,
            row_s=head_flop(self.spec) / products,
            context_token_s=max(self.kv_bytes / read, pair),
            pair_s=pair,
            blend=2.0,
        )
