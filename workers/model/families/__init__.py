"""The families of decoders that can be served, by the `model_type` of their configs.

A family is one function from config to ModelSpec and one WeightNames, in a file of its own or beside its kin,
and a line in FAMILIES; `docs/families.md` goes through it step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.model.architecture import ModelSpec
from workers.model.config_fields import ConfigFields
from workers.model.families.falcon import falcon
from workers.model.families.gemma import gemma2, gemma3_text
from workers.model.families.gpt2 import gpt2
from workers.model.families.gpt_neox import gpt_neox
from workers.model.families.llama import granite, llama, mistral, qwen2, qwen3
from workers.model.families.moe import mixtral, qwen3_moe
from workers.model.families.olmo2 import olmo2
from workers.model.families.phi3 import phi3
from workers.model.families.starcoder2 import starcoder2

FAMILIES: Mapping[str, Callable[[ConfigFields], ModelSpec]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt2": gpt2,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi3": phi3,
    "olmo2": olmo2,
    "granite": granite,
    "starcoder2": starcoder2,
    "gpt_neox": gpt_neox,
    "falcon": falcon,
}
