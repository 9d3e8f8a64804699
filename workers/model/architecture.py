"""What a decoder looks like: plain data that drives the one decoder class. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workers.model.names import WeightNames


class RotaryKind(Enum):
    """How the rotary frequencies are stretched beyond the trained length."""

    DEFAULT = "default"  # not at all (Su et al. 2021)
    LINEAR = "linear"  # positions divided by a factor (Chen et al. 2023)
    DYNAMIC = "dynamic"  # NTK-aware: the base grows with the length (bloc97, emozilla 2023)
    LLAMA3 = "llama3"  # long wavelengths divided, short ones kept (Llama 3.1)
    YARN = "yarn"  # a ramp between the two, and warmer attention (Peng et al. 2023)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary position embedding. Fields that a kind does not use keep their defaults."""

    kind: RotaryKind
    theta: float
    dim: int  # elements of a head that turn; even
    trained_positions: int  # length before stretching; where DYNAMIC sets in
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0  # LLAMA3
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0  # YARN
    truncate: bool = True  # YARN: ramp between whole dimensions


class NormKind(Enum):
    """The norm before attention, MLP and head."""

    RMS = "rms"
    LAYER = "layer"  # with bias


class Activation(Enum):
    """The nonlinearity of the MLP."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder. Sizes are of the whole model; `*_of_rank` say what a rank holds of them."""

    weights: WeightNames
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int  # longest context in tokens
    norm: NormKind
    norm_eps: float
    gated_mlp: bool  # activation(gate) * up, else activation(up)
    activation: Activation
    qkv_bias: bool
    output_bias: bool  # of the attention output projection
    mlp_bias: bool
    qk_norm: bool  # RMS norm of every query and key head
    rotary: RotarySpec | None
    learned_positions: bool  # a table of max_model_len rows is added to the embedding
    attention_scale: tuple[float, ...]  # per layer
    sliding_window: tuple[int | None, ...]  # per layer: tokens a row sees, itself included; None: all
    tie_word_embeddings: bool  # what the config says; the weight files decide (see weights.py)

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def norm_bias(self) -> bool:
        return self.norm is NormKind.LAYER

    @property
    def is_prefix_reusable(self) -> bool:
        """Whether keys depend on the tokens before them only. Dynamic rotary scaling makes them depend on the
        length of the step's context too, so that blocks of a shorter prompt do not fit a longer one.
        """
        return self.rotary is None or self.rotary.kind is not RotaryKind.DYNAMIC

    def kv_heads_of_rank(self, rank: int, tensor_parallel: int) -> range:
        """KV heads that a rank holds."""
        return kv_heads_of_rank(self.num_kv_heads, rank, tensor_parallel)

    def q_heads_of_rank(self, rank: int, tensor_parallel: int) -> range:
        """Query heads that a rank computes; all of them read KV heads of the same rank."""
        if tensor_parallel <= self.num_kv_heads:
            kv_heads = self.kv_heads_of_rank(rank, tensor_parallel)
            group = self.queries_per_kv_head
            return range(kv_heads.start * group, kv_heads.stop * group)
        return share(self.num_heads, rank, tensor_parallel)

    def intermediate_of_rank(self, rank: int, tensor_parallel: int) -> range:
        """Columns of the MLP that a rank computes."""
        return share(self.intermediate_size, rank, tensor_parallel)

    def vocab_of_rank(self, rank: int, tensor_parallel: int) -> range:
        """Rows of the embedding and of the head that a rank holds."""
        return share(self.vocab_size, rank, tensor_parallel)


def kv_heads_of_rank(num_kv_heads: int, rank: int, tensor_parallel: int) -> range:
    """KV heads that a rank holds: an even share, or one copy when ranks outnumber the heads."""
    if tensor_parallel <= num_kv_heads:
        return share(num_kv_heads, rank, tensor_parallel)
    head = rank * num_kv_heads // tensor_parallel
    return range(head, head + 1)


def share(total: int, rank: int, size: int) -> range:
    """The part of 0 .. total - 1 that a rank holds: first parts are larger by at most one."""
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))
