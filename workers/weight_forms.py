"""In which forms the weights of linear layers are held. No torch here: planning computes with them too.

`workers.kernels.quantized` says how a matrix gets its codes.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

GROUP = 32  # inputs that share a scale and a minimum in INT4


class Quantization(Enum):
    """Storage of the weights of linear layers."""

    NONE = "none"  # in the model's dtype
    INT8 = "int8"
    INT4 = "int4"
    AUTO = "auto"  # each matrix as the checkpoint stores it; a choice for loading, not a form of its own

    @property
    def of_head(self) -> Quantization:
        """How the head is kept. It is felt most: 4 bits there alone raise SmolLM2's perplexity by 5 %."""
        return Quantization.INT8 if self is Quantization.INT4 else self


class WeightForms(NamedTuple):
    """What most matrices of the layers, and the head, are held in; never AUTO."""

    layers: Quantization = Quantization.NONE
    head: Quantization = Quantization.NONE

    @classmethod
    def made(cls, quantization: Quantization) -> WeightForms:
        """What a start makes of a checkpoint, or `tandem model quantize`."""
        return cls(quantization, quantization.of_head)
