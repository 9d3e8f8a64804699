"""The decoder: one class for every family, driven by its ModelSpec.

A step, per layer: norm -> fused QKV -> (norm of queries and keys) -> rotary and KV write -> paged attention
-> output projection -> (norm) -> norm -> MLP -> (norm). Addition to the residual stream is fused into the
norm that follows it. Some families run the MLP beside attention, on the same rows, and add up both at once.
After the last attention only the rows whose logits are wanted go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from workers.kernels import (
    Draw,
    Drawn,
    Kernels,
    LayerCache,
    PagedCache,
    Quantization,
    RankPart,
    StepBatch,
    StepMessage,
    Turn,
    build_batch,
    fill_ids,
    fill_in,
    has_lengths,
    header_of,
    kernels_for,
    unpack,
)
from workers.model.architecture import LayerOrder, ModelSpec
from workers.model.checkpoint import Checkpoint
from workers.model.fused import fuse
from workers.model.layers import DecoderWeights, Layer
from workers.model.loader import load_weights
from workers.model.norms import Norm
from workers.model.parallel import TensorParallel


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
    kernels: Kernels | None = None,
    quantization: Quantization = Quantization.NONE,
) -> Decoder:
    """Reads this rank's part of the weights and lays it out for `device`. `kernels`: None for the fastest.

    quantization: of the weights of all linear layers, and of the head as `Quantization.of_head` says;
    embeddings and norms stay as they are.
    Raises TensorParallelError when the model cannot be split that way, CheckpointError for weights that are
    not finite or not in the range of `quantization`.
    """
    chosen = kernels_for(device, dtype) if kernels is None else kernels
    weights = load_weights(checkpoint, dtype, device, tp, chosen, quantization)
    return Decoder(checkpoint.spec, weights, chosen, tp)


class Decoder:
    """Runs steps of one model on one rank. All ranks of a group call `forward` with equal messages."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, kernels: Kernels, parallel: TensorParallel
    ) -> None:
        self.spec = spec
        self.num_heads = len(spec.q_heads_of_rank(parallel.rank, parallel.size))
        self.num_kv_heads = len(spec.kv_heads_of_rank(parallel.rank, parallel.size))
        self._weights = weights
        self.kernels = kernels
        # In the dtype of the model, as it was trained.
        self._multiplier = float(weights.embedding.weight.new_tensor(spec.embedding_multiplier))
        self._fused = fuse(spec, weights, kernels, parallel)
        self._parallel = parallel
        self._is_first_rank = parallel.rank == 0
        self._is_alone = parallel.size == 1

    @property
    def is_recordable(self) -> bool:
        """Whether `run_batch` waits for nothing by itself; with experts the host counts their rows."""
        return self.spec.experts is None

    @property
    def shares_attention(self) -> bool:
        """Whether this rank could do attention of its peers, and they its own; see `share_attention`."""
        return self._fused is not None and not self._is_alone

    def share_attention(self, parts: tuple[RankPart, ...], max_tokens: int) -> None:
        """As `FusedStep.share`; only where all ranks say `shares_attention`."""
        assert self._fused is not None, "only a fused step shares its attention"
        self._fused.share(parts, max_tokens)

    @property
    def head_ids(self) -> tuple[int, ...] | None:
        """The token of each column of the logits; None: all tokens, in order."""
        return self._weights.head_ids

    def forward(
        self,
        message: StepMessage,
        kv: PagedCache,
        draws: Sequence[Draw] = (),
        drawn: torch.Tensor | None = None,
        *,
        ids_only: bool = False,
    ) -> Drawn | None:
        """Computes the rows of a step, writes their keys and values; on rank 0 returns logits and drawn ids.

        kv: the pool of this rank. draws: one a logit row, or none; as `Kernels.draw` with `only_finite`;
        other ranks have none. drawn (R,) int64 on the model's device: ids of the step before, for its
        placeholders; None: there are none. ids_only: nobody looks at the logits, which then may have any
        values. Raises ValueError for a message that is damaged or has an index
        outside of pool or vocabulary.
        """
        header, room = header_of(message), kv.num_blocks * kv.block_size
        longest = header.longest_context
        if not 0 <= longest <= room:  # the table of positions grows with it, whatever the checkpoint allows
            raise ValueError(f"a step with a context of {longest} tokens, in a pool for {room}")
        found = self._compute(message, kv, draws, drawn, ids_only)
        if header.num_logit_rows == 0:
            self.meet(kv.device)
        return found

    def _compute(
        self,
        message: StepMessage,
        kv: PagedCache,
        draws: Sequence[Draw],
        drawn: torch.Tensor | None,
        ids_only: bool,
    ) -> Drawn | None:
        if self._fused is not None and not has_lengths(message):
            rotaries = self._weights.rotaries  # one at most
            turn = rotaries[0].table(header_of(message).longest_context) if rotaries else None
            if turn is not None or not rotaries:
                if drawn is not None:
                    message = fill_in(message, drawn.tolist())
                if self._is_alone or self._fused.shares_logits(header_of(message).num_logit_rows):
                    drawn_here = self._fused(message, turn, kv, draws, ids_only=ids_only)
                    return drawn_here if self._is_first_rank else None
                found = self._fused(message, turn, kv)
                return self.draw(self._weights.head.gather(found.logits), found.hidden, draws)
        batch = build_batch(
            unpack(message),
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            vocab_size=self.spec.vocab_size,
            device=kv.device,
            num_drawn=0 if drawn is None else len(drawn),
        )
        if drawn is not None:
            fill_ids(batch.token_ids, drawn)
        return self.draw(*self.run_batch(batch, kv), draws)

    def draw(
        self, logits: torch.Tensor | None, hidden: torch.Tensor | None, draws: Sequence[Draw]
    ) -> Drawn | None:
        """What `forward` returns, from what `run_batch` has."""
        if logits is None:
            return None
        ids = self.kernels.draw(logits, draws, only_finite=True) if draws else []
        return Drawn(logits, ids, hidden)

    def share(self, x: torch.Tensor) -> None:
        """Rank 0's x on all ranks, in place."""
        self._parallel.share(x)

    @torch.inference_mode()
    def meet(self, device: torch.device) -> None:
        """Waits until every rank has written its keys and values. Logits bring the ranks together after the
        last attention, and the host waits for the ids; without them rank 0 would end the step, and let other
        groups read, while a rank's device still computes the last layer."""
        if not self._is_alone:
            self._parallel.all_reduce(torch.zeros(1, device=device)).item()
        elif device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    @torch.inference_mode()
    def run_batch(self, batch: StepBatch, kv: PagedCache) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The step operator by operator, whatever the batch says: logits, and what the head was given.

        Logits are None on all ranks but the first. Waits for nothing where it `is_recordable`, if the kernels
        do not.
        """
        weights, rows = self._weights, batch.logit_rows
        residual = self._embed(batch)  # (T, hidden)
        turns = [rotary.rows(batch) for rotary in weights.rotaries]
        normed = weights.layers[0].attention_norm(residual)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            turn = None if layer.rotary is None else turns[layer.rotary]
            attended = self._attend(layer, normed, turn, batch, kv.layers[index])
            if index == last:
                if rows.shape[0] == 0:
                    return self._no_logits(residual), None
                attended, normed, residual = attended[rows], normed[rows], residual[rows]
            mixed, residual = self._mix(layer, attended, normed, residual)
            following = weights.final_norm if index == last else weights.layers[index + 1].attention_norm
            normed, residual = following.add(mixed, residual)
        return self._logits(normed), normed

    def _embed(self, batch: StepBatch) -> torch.Tensor:
        residual = self._weights.embedding(batch.token_ids)
        if self._weights.positions is not None:
            residual = residual + F.embedding(batch.positions, self._weights.positions)
        return residual if self._multiplier == 1.0 else residual * self._multiplier

    def _attend(
        self,
        layer: Layer,
        normed: torch.Tensor,
        turn: Turn | None,
        batch: StepBatch,
        cache: LayerCache,
    ) -> torch.Tensor:
        """normed (T, hidden) -> (T, q heads * head_dim) of this rank."""
        rows, head_dim = normed.shape[0], self.spec.head_dim
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = layer.qkv(normed).view(rows, heads + 2 * kv_heads, head_dim)
        q, k, v = torch.split_with_sizes(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.query_key_norm is not None:
            q, k = layer.query_key_norm(q, k)
        cos, sin = turn or (None, None)
        q = self.kernels.rotary_and_write(q, k, v, cos, sin, batch, cache)
        attended = self.kernels.paged_attention(
            q, cache, batch, layer.scale, layer.sliding_window, self.spec.attention_soft_cap
        )
        return attended.reshape(rows, heads * head_dim)

    def _mix(
        self, layer: Layer, attended: torch.Tensor, normed: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer after its attention: what is still to be added to the residual stream, and the stream.

        attended (R, q heads * head_dim) of this rank; normed (R, hidden): what attention has read.
        """
        if self.spec.order is LayerOrder.SERIAL:
            # All-reduce: a rank has the share of its own heads; the norm needs the whole sum.
            mixed = self._parallel.add_up(layer.output(attended))
            assert layer.mlp_norm is not None, "the MLP reads what attention has not"
            normed, residual = layer.mlp_norm.add(self._to_add(mixed, layer.attention_post_norm), residual)
            # All-reduce: a rank has the share of its own inner columns, or experts; the same.
            mixed = self._parallel.add_up(layer.mlp(normed))
            return self._to_add(mixed, layer.mlp_post_norm), residual
        if layer.mlp_norm is not None:
            normed = layer.mlp_norm(residual)
        # All-reduce: one for the shares of both, which meet in the residual stream only.
        mixed = self._parallel.add_up(layer.output(attended), layer.mlp(normed))
        return self._to_add(mixed, None), residual

    def _to_add(self, mixed: torch.Tensor, post_norm: Norm | None) -> torch.Tensor:
        if post_norm is not None:
            mixed = post_norm(mixed)
        return mixed if self.spec.residual_multiplier == 1.0 else mixed * self.spec.residual_multiplier

    def _logits(self, normed: torch.Tensor) -> torch.Tensor | None:
        """normed (R, hidden) -> (R, vocabulary) float32 on rank 0, None elsewhere."""
        logits, spec = self._weights.head(normed), self.spec
        if logits is None:
            return None
        if spec.logits_divisor != 1.0:
            logits = logits / spec.logits_divisor
        if spec.logits_soft_cap is not None:
            logits = torch.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
        return logits

    def _no_logits(self, residual: torch.Tensor) -> torch.Tensor | None:
        """Every row of the step was an inner part of a prompt: its keys and values are all that counted."""
        if not self._is_first_rank:
            return None
        return residual.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
