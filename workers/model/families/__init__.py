"""The families of decoders that can be served, by the `model_type` of their configs.

A family is one function from config to ModelSpec and one WeightNames, in a file of its own or beside its kin,
and a line in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.model.architecture import ModelSpec
from workers.model.config_fields import ConfigFields
from workers.model.families.gpt2 import gpt2
from workers.model.families.llama import llama, mistral, qwen2, qwen3

FAMILIES: Mapping[str, Callable[[ConfigFields], ModelSpec]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gpt2": gpt2,
}
