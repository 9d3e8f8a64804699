"""What a decoder looks like: plain data that drives the one decoder class. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workers.model.names import WeightNames
from workers.model.shares import MOST_EQUAL_RANKS, expert_cuts, inner_leaves, kv_heads_of_rank, share


class RotaryKind(Enum):
    """How the rotary frequencies are stretched beyond the trained length."""

    DEFAULT = "default"  # not at all (Su et al. 2021)
    LINEAR = "linear"  # positions divided by a factor (Chen et al. 2023)
    DYNAMIC = "dynamic"  # NTK-aware: the base grows with the length (bloc97, emozilla 2023)
    LLAMA3 = "llama3"  # long wavelengths divided, short ones kept (Llama 3.1)
    YARN = "yarn"  # a ramp between the two, and warmer attention (Peng et al. 2023)
    LONGROPE = "longrope"  # a factor for every pair, others in long contexts (Ding et al. 2024)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary position embedding. Fields that a kind does not use keep their defaults."""

    kind: RotaryKind
    theta: float
    dim: int  # elements of a head that turn; even
    trained_positions: int  # length before stretching; where DYNAMIC and the long factors of LONGROPE set in
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0  # LLAMA3
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0  # YARN
    truncate: bool = True  # YARN: ramp between whole dimensions
    short_factors: tuple[float, ...] = ()  # LONGROPE: what divides the frequency of each pair
    long_factors: tuple[float, ...] = ()  # LONGROPE: the same beyond trained_positions

    def depends_on_length(self, longest_context: int) -> bool:
        """Whether, in a context of that many tokens, more than its position tells how far a token turns."""
        varies = self.kind in (RotaryKind.DYNAMIC, RotaryKind.LONGROPE)
        return varies and longest_context > self.trained_positions


class NormKind(Enum):
    """What the norms of layers and of the head do."""

    RMS = "rms"
    LAYER = "layer"


class NormPlaces(Enum):
    """Where a layer has norms."""

    BEFORE = "before"  # attention and MLP
    AFTER = "after"  # them, before their result joins the residual stream
    AROUND = "around"  # both


class LayerOrder(Enum):
    """What the MLP of a layer reads."""

    SERIAL = "serial"  # the residual stream with the result of attention in it
    PARALLEL = "parallel"  # what attention reads too, through a norm of its own
    PARALLEL_ONE_NORM = "parallel_one_norm"  # what attention reads too, through the same norm


class QkNorm(Enum):
    """RMS norm of queries and keys before they turn."""

    NONE = "none"
    HEADS = "heads"  # of every head by itself
    WIDTH = "width"  # of all query heads as one vector, and of all key heads


class Activation(Enum):
    """The nonlinearity of the MLP."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The gated MLPs of a layer of which a row goes through some; alike in all layers that have any."""

    layers: tuple[int, ...]  # that have them, rising; at least one
    num_experts: int  # of a layer
    num_per_token: int
    intermediate_size: int  # of each
    is_renormalized: bool  # the shares of the chosen ones are made to add up to 1

    def of_rank(self, rank: int, tensor_parallel: int) -> range:
        """Those of a layer that a rank holds; none, where ranks outnumber them."""
        if tensor_parallel > MOST_EQUAL_RANKS:
            return share(self.num_experts, rank, tensor_parallel)
        cuts = expert_cuts(self.num_experts)
        leaves = share(len(cuts) - 1, rank, tensor_parallel)
        return range(cuts[leaves.start], cuts[leaves.stop])

    @property
    def share_per_token(self) -> float:
        """Of the experts, those that a token goes through."""
        return self.num_per_token / self.num_experts


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
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to all norm weights of the files
    norm_places: NormPlaces = NormPlaces.BEFORE
    order: LayerOrder = LayerOrder.SERIAL
    gated_mlp: bool  # activation(gate) * up, else activation(up)
    activation: Activation
    qkv_bias: bool
    output_bias: bool  # of the attention output projection
    mlp_bias: bool
    experts: ExpertsSpec | None = None  # None: every layer has one MLP
    qk_norm: QkNorm = QkNorm.NONE
    rotary: tuple[RotarySpec | None, ...]  # per layer; None: nothing turns
    learned_positions: bool = False  # a table of max_model_len rows is added to the embedding
    attention_scale: tuple[float, ...]  # per layer
    attention_soft_cap: float | None = None  # c: scores become c tanh(score / c)
    sliding_window: tuple[int | None, ...]  # per layer: tokens a row sees, itself included; None: all
    embedding_multiplier: float = 1.0  # rounded to the dtype of the model
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None  # as attention_soft_cap, after the division
    tie_word_embeddings: bool  # what the config says; the weight files decide (see weights.py)

    def experts_of_layer(self, index: int) -> ExpertsSpec | None:
        """None: every row goes through the same MLP."""
        return self.experts if self.experts is not None and index in self.experts.layers else None

    @property
    def num_dense_layers(self) -> int:
        """Layers with one MLP."""
        return self.num_layers - (0 if self.experts is None else len(self.experts.layers))

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def longest_window(self) -> int | None:
        """Tokens that a row sees in the layer that sees most; None: all."""
        windows = [window for window in self.sliding_window if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def rotaries(self) -> tuple[RotarySpec, ...]:
        """The different ones of the layers."""
        return tuple(dict.fromkeys(rotary for rotary in self.rotary if rotary is not None))

    def is_prefix_reusable(self, max_model_len: int) -> bool:
        """Whether keys depend on the tokens before them only, in contexts of up to `max_model_len` tokens.
        Some rotary scaling makes them depend on the length of the step's context too, so that blocks of a
        shorter prompt do not fit a longer one.
        """
        return not any(rotary.depends_on_length(max_model_len) for rotary in self.rotaries)

    def recompute_past(self, max_model_len: int) -> int | None:
        """Tokens of a sequence beyond which all of its keys turn otherwise, once; None: up to `max_model_len`
        they do not."""
        lengths = [
            rotary.trained_positions
            for rotary in self.rotaries
            if rotary.kind is RotaryKind.LONGROPE and rotary.depends_on_length(max_model_len)
        ]
        return min(lengths, default=None)

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
        if not self.adds_as_one_rank(tensor_parallel):
            return share(self.intermediate_size, rank, tensor_parallel)
        widths = self.inner_leaves
        leaves = share(len(widths), rank, tensor_parallel)
        return range(sum(widths[: leaves.start]), sum(widths[: leaves.stop]))

    @property
    def inner_leaves(self) -> tuple[int, ...]:
        """Widths of the parts that the columns of the MLP are handed out in."""
        return inner_leaves(self.intermediate_size, self.num_heads, self.num_kv_heads)

    def adds_as_one_rank(self, tensor_parallel: int) -> bool:
        """Whether a group of that size adds up in the order of all smaller ones (`workers.kernels.order`)."""
        return tensor_parallel <= min(MOST_EQUAL_RANKS, len(self.inner_leaves))

    def vocab_of_rank(self, rank: int, tensor_parallel: int) -> range:
        """Rows of the embedding and of the head that a rank holds."""
        return share(self.vocab_size, rank, tensor_parallel)
