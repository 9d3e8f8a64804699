"""The works that the engine benchmark measures, and the least time physics leaves for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workers.model.architecture import ModelSpec

DECODE_PROMPT_TOKENS = 128
SWEEP_PROMPT_TOKENS = 512
_KV_BYTES = 2  # of a key or value, in every format


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """What the machine can do, measured beside the works."""

    read_bytes_per_s: float
    flop_per_s: float


def limit(work: Work, spec: ModelSpec, weights: WeightFormat, roofs: Roofs) -> float:
    """The best figure possible: memory read once at the read rate, or products at the matrix rate.

    Memory: all weights (a tied head once) and the keys and values of the context, once a step. Products: two
    operations a weight and row; the head only for rows that are sampled; attention over the causal half.
    Attention is counted at the format's rate too, which only makes the limit higher.
    """
    per_layer = _layer_parameters(spec)
    body, head = per_layer * spec.num_layers, spec.hidden_size * spec.vocab_size
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * _KV_BYTES
    flop_per_s = roofs.flop_per_s * weights.speedup
    pair_flop = 4 * spec.num_heads * spec.head_dim * spec.num_layers  # of one query row and one key
    if work.kind is Kind.DECODE:
        context = work.prompt_tokens + work.new_tokens / 2
        read = (body + head) * weights.weight_bytes + work.batch * context * kv_bytes
        flop = work.batch * (2 * (body + head) + context * pair_flop)
        return work.batch / max(read / roofs.read_bytes_per_s, flop / flop_per_s)
    rows = work.prompt_tokens - work.cached_tokens
    pairs = rows * (work.cached_tokens + rows / 2)
    read = (body + head) * weights.weight_bytes + work.cached_tokens * kv_bytes
    flop = 2 * (body * rows + head) + pairs * pair_flop
    seconds = max(read / roofs.read_bytes_per_s, flop / flop_per_s)
    return work.figure(seconds, seconds)


def _layer_parameters(spec: ModelSpec) -> int:
    """Weights of the linear layers of one layer."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    mlp = (3 if spec.gated_mlp else 2) * spec.intermediate_size
    return spec.hidden_size * (heads + spec.num_heads * spec.head_dim + mlp)
