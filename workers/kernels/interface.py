"""What every kernel set offers. The decoder holds one object of this kind and asks no more about the device.

Life of a step in terms of these calls, per layer: `rms_norm` (or `add_rms_norm`) -> packed QKV linear ->
`rotary_and_write` -> `paged_attention` -> packed output linear -> `add_rms_norm` -> packed gate/up linear ->
`silu_mul` -> packed down linear.

Every method takes T >= 0 rows and computes each row without regard to the others of the batch. The C++
kernels give it the same bits whatever these are; torch's matrix products take other orders for other numbers
of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from workers.kernels.batch import StepBatch
from workers.kernels.collective import SharedCollective
from workers.kernels.draw import Draw
from workers.kernels.order import NodeOrder, SumOrder
from workers.kernels.paged_cache import LayerCache, PagedCache
from workers.kernels.quantized import QuantizedWeight
from workers.kernels.step_message import StepMessage
from workers.weight_forms import Quantization

Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, both (positions, half) float32


class PackedLinear(Protocol):
    """x (..., in) -> x @ weight.T + bias (..., out), with the weight laid out once for this device."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PartLinear(Protocol):
    """A rank's part of a row-parallel linear layer."""

    def nodes(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in of this rank) -> what lies under every node of its part: (nodes, T, out) float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayer:
    """One layer of a model that a fused step can run: RMS norms before attention and MLP, gated SiLU."""

    attention_norm: torch.Tensor  # (hidden,), as every norm in the dtype of the model
    qkv: PackedLinear  # hidden -> [q heads | kv heads | kv heads] * head_dim
    query_norm: torch.Tensor | None  # (head_dim,); both or neither
    key_norm: torch.Tensor | None
    output: PackedLinear | PartLinear  # a part where the model has `output_nodes`, as `down`
    output_bias: torch.Tensor | None = None  # (hidden,) float32, of a part
    mlp_norm: torch.Tensor
    up: PackedLinear  # hidden -> [gate | up]
    down: PackedLinear | PartLinear
    down_bias: torch.Tensor | None = None
    scale: float  # of attention scores
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A decoder, as one rank holds it."""

    embedding: torch.Tensor  # (ids of this rank, hidden)
    first_id: int  # of those
    vocab_size: int  # of all ranks
    layers: tuple[StepLayer, ...]
    final_norm: torch.Tensor
    head: PackedLinear  # hidden -> vocabulary of this rank, float32
    num_heads: int  # of this rank, as num_kv_heads
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    collective: SharedCollective | None = None  # adds up embedding, `output` and `down`; None: one rank
    output_nodes: NodeOrder | None = None  # of all ranks; None with a collective: rounded and added by rank
    down_nodes: NodeOrder | None = None
    head_widths: tuple[int, ...] = ()  # columns of the head on each rank; with a collective


class Drawn(NamedTuple):
    """What a step leaves."""

    logits: torch.Tensor  # (R, vocabulary) float32, valid until the next step; any values with `ids_only`
    ids: list[int]  # one a row, or none when no draws were asked for
    hidden: torch.Tensor | None = None  # (R, hidden): what the head was given; valid as long


class LogitsPart(NamedTuple):
    """Where all ranks leave their columns of a step's logits, and draw ids from whole rows for rank 0."""

    logits: torch.Tensor  # (rows, vocabulary) float32
    draws: torch.Tensor  # (rows, fields of a Draw) float64
    ids: torch.Tensor  # (rows,) int64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What a rank lets its peers read and write, so that they can do some of its work."""

    pool: torch.Tensor  # (num_blocks, block_bytes) uint8
    work: torch.Tensor  # uint8: the QKV rows of a step, then its attended rows, in bfloat16
    num_heads: int
    num_kv_heads: int
    logits: LogitsPart | None = None  # of all ranks, with rank 0's part; None: each keeps its own


class FusedStep(Protocol):
    """Runs a whole step in one call."""

    def __call__(
        self,
        message: StepMessage,
        turn: Turn | None,
        kv: PagedCache,
        draws: Sequence[Draw] = (),
        *,
        ids_only: bool = False,
    ) -> Drawn:
        """turn: by position, at least up to the longest context, None: nothing turns; kv: the pool.

        draws: one a logit row, or none; as `Kernels.draw` with `only_finite`. Several ranks have their parts
        of heads and vocabulary; raises CollectiveFailed when one does not come. They have no draws but on
        rank 0, and there only where the step `shares_logits`. Raises ValueError for a
        message that is damaged or has an index outside of pool, vocabulary or `turn`. ids_only: nobody looks
        at the logits, which then may have any values.
        """
        ...

    def share(self, parts: tuple[RankPart, ...], max_tokens: int) -> None:
        """Before the first step, and on every rank: these, in the order of the ranks, are mapped by all.

        max_tokens: of a step, for which there is room in `work`.
        """
        ...

    def shares_logits(self, num_rows: int) -> bool:
        """Whether a step of so many logit rows gives rank 0 those of all ranks, and ids drawn from them; else
        every rank gets its own columns. The same on all ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessHead:
    """A head that makes of a hidden state and the token that came after it the state one place further on:
    state + out(silu(of_state(state) + tokens[token]))."""

    state: PackedLinear  # hidden -> inner, float32
    tokens: torch.Tensor  # (guessed tokens + 1, inner): of each, and at last of any other token
    out: PackedLinear  # inner -> hidden, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessModel:
    """Heads that guess tokens, and the part of the vocabulary that they guess."""

    heads: tuple[GuessHead, ...]
    vocabulary: PackedLinear  # hidden -> guessed tokens, float32
    token_ids: tuple[int, ...]  # of its outputs
    vocab_size: int


class GuessTask(NamedTuple):
    """What is to be guessed after a row; in the order of GuessTask in cpu/guess.h."""

    row: int  # of the hidden states
    token_id: int  # that came after it
    # That are wanted: no head is asked when those before have said so many that are as likely.
    num_tokens: int
    is_chain: bool = False  # only the best token of each head counts


GUESS_BRANCHES = 4  # tokens that a head says after one
GuessedTokens = list[tuple[int, float]]  # best first, each with its log-probability


class FusedGuesses(Protocol):
    """Makes all guesses in one call."""

    def __call__(
        self, hidden: torch.Tensor, tasks: Sequence[GuessTask], least: float
    ) -> list[list[GuessedTokens] | None]:
        """Of each task the likeliest tokens of head after head; None: values that are not finite.

        hidden: (rows, hidden). Each head goes on from the best token of the head before it, as long as that
        has, with all that it follows, at least the log-probability `least`, and the task wants more tokens
        than have been found that are as likely.
        """
        ...


class Kernels(Protocol):
    """Operators of a decoder layer over torch tensors of one dtype on one device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last axis (Zhang and Sennrich 2019), computed in float32.

        x (T, n) or (T, heads, n), possibly a strided view with a dense last axis; weight (n,).
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); all (T, n). May write the sum over `residual`."""
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Layer norm over the last axis (Ba et al. 2016); x (T, n), weight and bias (n,)."""
        ...

    def rotary_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        batch: StepBatch,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Turns q and k by their position, stores k and v at `batch.slots`; returns q, turned.

        q (T, heads, d), k and v (T, kv_heads, d): views with a dense last axis, for instance of one QKV row;
        q may be changed in place (and is what comes back), k and v are only read. cos and sin are
        (T, rot / 2) float32, one row per token; the first rot <= d elements of a head turn in halves, as in
        GPT-NeoX (Su et al. 2021); None: nothing turns. Into an int8 cache go the turned keys, as a cache of
        this dtype would have them, and the values by `quantize_rows`.
        """
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of every row to its own sequence through the block table: (T, heads, d).

        The keys and values of this step must have been written, and are read as the cache has them. heads is
        a multiple of kv_heads; query head h reads kv head h // (heads / kv_heads). A row at position p sees
        positions max(0, p - window + 1)..p.
        soft_cap c: a score s becomes c tanh(s / c) (Gemma 2, 2024). With a window, blocks that end before the
        first position that a row sees, rounded down to a multiple of 64, may be anybody's and hold anything.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up (T, 2 n) = [gate | up]: (T, n)."""
        ...

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """x sigmoid(x)."""
        ...

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """GELU as it is defined, by the normal distribution (Hendrycks and Gimpel 2016)."""
        ...

    def gelu_new(self, x: torch.Tensor) -> torch.Tensor:
        """GELU in its tanh form, as GPT-2 uses it."""
        ...

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw], *, only_finite: bool = False) -> list[int]:
        """An id for every row of logits (R, V) float32, as `workers.kernels.draw` says.

        Minus infinity is an id of probability 0. Each row needs a finite largest logit and has no NaN; with
        `only_finite` any row will do, and one that holds a NaN or an infinity gets NOT_FINITE for an id.
        """
        ...

    def draw_ids(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """As `draw` with `only_finite`, but the ids (R,) int64 stay where the logits are, and on a GPU nobody
        waits for them."""
        ...

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        quantization: Quantization = Quantization.NONE,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        """Lays weight (out, in) out for this device, once. The result keeps its own copy where it needs one.

        out_dtype: of the result; None: the dtype of the weight. float32 saves the head a conversion.
        quantization: the result is a product with `quantize(weight, quantization).values()`; kernels may
        round the inputs too, to 8 or 16 bits, every row for itself. Raises ValueError where the weight does
        not fit that form. order: of the inputs, with one node; None, or where the products are torch's: any.
        """
        ...

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        """As `pack_linear` for a weight that is quantized already: its codes stay as they are.

        dtype: of the inputs, and of the result unless out_dtype says another.
        """
        ...

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        """As `pack_linear` or `pack_quantized` for the inputs that one rank holds of a row-parallel matrix.

        dtype: of the inputs.
        """
        ...

    def fuse(self, model: StepModel) -> FusedStep | None:
        """The whole step as one call, where that exists for this model; bits as of the single operators."""
        ...

    def fuse_guesses(self, model: GuessModel) -> FusedGuesses | None:
        """All guesses as one call, where that exists for these heads; not to the bits of the operators."""
        ...
