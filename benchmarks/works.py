"""The works that the engine benchmark measures, and the least time physics leaves for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.plan.arithmetic import (
    expert_parameters,
    head_parameters,
    kv_bytes_per_token,
    layer_linear_parameters,
)
from cluster.plan.devices import Roofs
from cluster.plan.roofline import Load
from workers.model.architecture import ModelSpec

DECODE_PROMPT_TOKENS = 128
SWEEP_PROMPT_TOKENS = 512


class Kind(Enum):
    """What of a run counts."""

    DECODE = "decode"  # B (N - 1) / (T_N - T_1): tokens after the first, without the prompt
    PREFILL = "prefill"  # prompt tokens / time to the first token
    CACHED = "ttft"  # milliseconds to the first token with a cached beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One row of the benchmark."""

    kind: Kind
    batch: int = 1
    prompt_tokens: int
    cached_tokens: int = 0
    new_tokens: int = 1

    @property
    def unit(self) -> str:
        return "ms" if self.kind is Kind.CACHED else "tok/s"

    @property
    def label(self) -> str:
        match self.kind:
            case Kind.DECODE:
                is_sweep = self.prompt_tokens == SWEEP_PROMPT_TOKENS
                return f"decode b{self.batch}" + (f" p{SWEEP_PROMPT_TOKENS}" if is_sweep else "")
            case Kind.PREFILL:
                return f"prefill {self.prompt_tokens}"
            case Kind.CACHED:
                return f"ttft {self.prompt_tokens} cached {self.cached_tokens}"

    def name(self, model: str, dtype: str) -> str:
        return f"{model} {dtype} {self.label}"

    def figure(self, first_s: float, all_s: float) -> float:
        """The measure, from the seconds to the first token and to the last; for DECODE all_s > first_s."""
        match self.kind:
            case Kind.DECODE:
                return self.batch * (self.new_tokens - 1) / (all_s - first_s)
            case Kind.PREFILL:
                return self.prompt_tokens / first_s
            case Kind.CACHED:
                return first_s * 1e3

    def times_better(self, ours: float, theirs: float) -> float:
        """How many times ours is as good; above 1 is ahead, whatever the unit."""
        return theirs / ours if self.kind is Kind.CACHED else ours / theirs


def standard_works(new_tokens: int) -> list[Work]:
    """Decode at three batch sizes, prefill at two lengths, and a prompt of which most is cached."""
    return [
        *(
            Work(kind=Kind.DECODE, batch=b, prompt_tokens=DECODE_PROMPT_TOKENS, new_tokens=new_tokens)
            for b in (1, 8, 32)
        ),
        *(Work(kind=Kind.PREFILL, prompt_tokens=n) for n in (512, 2048)),
        Work(kind=Kind.CACHED, prompt_tokens=2048, cached_tokens=1920),
    ]


def sweep_works(new_tokens: int) -> list[Work]:
    """Decode over batch sizes after prompts of 512."""
    return [
        Work(kind=Kind.DECODE, batch=b, prompt_tokens=SWEEP_PROMPT_TOKENS, new_tokens=new_tokens)
        for b in (1, 8, 32, 64, 128)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """What a weight is stored in."""

    name: str  # in the rows
    weight_bytes: float  # scales left out: no format can do with less
    speedup: float  # of products over bf16: an instruction of 8-bit values has twice as many


WEIGHT_FORMATS = {
    found.name: found
    for found in (
        WeightFormat(name="bf16", weight_bytes=2, speedup=1),
        WeightFormat(name="int8", weight_bytes=1, speedup=2),
        WeightFormat(name="int4", weight_bytes=0.5, speedup=2),
    )
}


def limit(work: Work, spec: ModelSpec, weights: WeightFormat, roofs: Roofs) -> float:
    """The best figure possible, as `cluster.plan.roofline` counts it, without scales of quantized weights."""
    load = Load(
        spec=spec,
        weight_bytes=(layer_linear_parameters(spec) + head_parameters(spec)) * weights.weight_bytes,
        expert_bytes=expert_parameters(spec) * weights.weight_bytes,
        kv_bytes=kv_bytes_per_token(spec),
        speedup=weights.speedup,
    )
    if work.kind is Kind.DECODE:
        context = work.prompt_tokens + work.new_tokens // 2
        return work.batch / load.decode(work.batch, context).seconds(roofs)
    seconds = load.prefill(work.prompt_tokens - work.cached_tokens, work.cached_tokens).seconds(roofs)
    return work.figure(seconds, seconds)
