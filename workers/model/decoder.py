"""The decoder: one class for every family, driven by its ModelSpec.

A step, per layer: norm -> fused QKV -> (norm of heads) -> rotary and KV write -> paged attention -> output
projection -> norm -> fused gate and up -> activation -> down projection. Addition to the residual stream is
fused into the norm that follows it. After the last attention only the rows whose logits are wanted go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from workers.kernels import (
    Draw,
    Drawn,
    Kernels,
    Quantization,
    StepBatch,
    StepMessage,
    Turn,
    build_batch,
    header_of,
    kernels_for,
    unpack,
)
from workers.model.architecture import Activation, ModelSpec
from workers.model.checkpoint import Checkpoint
from workers.model.fused import fuse
from workers.model.layers import DecoderWeights, Layer
from workers.model.loader import load_weights
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
        self._fused = fuse(spec, weights, kernels, parallel)
        self._parallel = parallel
        self._is_first_rank = parallel.rank == 0
        self._is_alone = parallel.size == 1

    @property
    def head_ids(self) -> tuple[int, ...] | None:
        """The token of each column of the logits; None: all tokens, in order."""
        return self._weights.head_ids

    def forward(self, message: StepMessage, kv: torch.Tensor, draws: Sequence[Draw] = ()) -> Drawn | None:
        """Computes the rows of a step, writes their keys and values; on rank 0 returns logits and drawn ids.

        kv: (num_blocks, kv heads of this rank, layers, 2, block_size, head_dim). draws: one a logit row, or
        none; as `Kernels.draw` with `only_finite`; other ranks have none. Raises ValueError for a message
        that is damaged or has an index outside of pool or vocabulary.
        """
        longest, room = header_of(message).longest_context, kv.shape[0] * kv.shape[4]
        if not 0 <= longest <= room:  # the table of positions grows with it, whatever the checkpoint allows
            raise ValueError(f"a step with a context of {longest} tokens, in a pool for {room}")
        drawn = self._compute(message, kv, draws)
        if header_of(message).num_logit_rows == 0:
            self.meet(kv.device)
        return drawn

    def _compute(self, message: StepMessage, kv: torch.Tensor, draws: Sequence[Draw]) -> Drawn | None:
        rotary = self._weights.rotary
        if self._fused is not None:
            turn = None if rotary is None else rotary.table(header_of(message).longest_context)
            if turn is not None or rotary is None:
                if self._is_alone:
                    return self._fused(message, turn, kv, draws)
                found = self._fused(message, turn, kv)
                return self.draw(self._weights.head.gather(found.logits), found.hidden, draws)
        batch = build_batch(
            unpack(message),
            block_size=kv.shape[4],
            num_blocks=kv.shape[0],
            vocab_size=self.spec.vocab_size,
            device=kv.device,
        )
        return self.draw(*self.run_batch(batch, kv), draws)

    def draw(
        self, logits: torch.Tensor | None, hidden: torch.Tensor | None, draws: Sequence[Draw]
    ) -> Drawn | None:
        """What `forward` returns, from what `run_batch` has."""
        if logits is None:
            return None
        ids = self.kernels.draw(logits, draws, only_finite=True) if draws else []
        return Drawn(logits, ids, hidden)

    @torch.inference_mode()
    def meet(self, device: torch.device) -> None:
        """Waits until every rank has written its keys and values. Logits bring the ranks together after the
        last attention; without them rank 0 would end the step, and let other groups read, while another rank
        still computes the last layer."""
        if not self._is_alone:
            self._parallel.all_reduce(torch.zeros(1, device=device)).item()

    @torch.inference_mode()
    def run_batch(
        self, batch: StepBatch, kv: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The step operator by operator, whatever the batch says: logits, and what the head was given.

        Logits are None on all ranks but the first. Waits for nothing, where the kernels do not.
        """
        weights, rows = self._weights, batch.logit_rows
        residual = weights.embedding(batch.token_ids)  # (T, hidden)
        if weights.positions is not None:
            residual = residual + F.embedding(batch.positions, weights.positions)
        turn = weights.rotary.rows(batch) if weights.rotary is not None else None
        keys, values = kv[:, :, :, 0].unbind(2), kv[:, :, :, 1].unbind(2)
        normed = weights.layers[0].attention_norm(residual)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attend(layer, normed, turn, batch, (keys[index], values[index]))
            if index == last:
                if rows.shape[0] == 0:
                    return self._no_logits(residual), None
                attended, residual = attended[rows], residual[rows]
            # All-reduce in `output`: a rank has the share of its own heads; the norm needs the whole sum.
            normed, residual = layer.mlp_norm.add(layer.output(attended), residual)
            # All-reduce in `down`: a rank has the share of its own inner columns; the same.
            mixed = layer.down(self._activate(layer.up(normed)))
            following = weights.final_norm if index == last else weights.layers[index + 1].attention_norm
            normed, residual = following.add(mixed, residual)
        return weights.head(normed), normed

    def _attend(
        self,
        layer: Layer,
        normed: torch.Tensor,
        turn: Turn | None,
        batch: StepBatch,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """normed (T, hidden) -> (T, q heads * head_dim) of this rank."""
        rows, head_dim = normed.shape[0], self.spec.head_dim
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = layer.qkv(normed).view(rows, heads + 2 * kv_heads, head_dim)
        q, k, v = torch.split_with_sizes(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = self.kernels.rms_norm(q, layer.query_norm, self.spec.norm_eps)
            k = self.kernels.rms_norm(k, layer.key_norm, self.spec.norm_eps)
        cos, sin = turn or (None, None)
        q = self.kernels.rotary_and_write(q, k, v, cos, sin, batch, *cache)
        attended = self.kernels.paged_attention(q, *cache, batch, layer.scale, layer.sliding_window)
        return attended.reshape(rows, heads * head_dim)

    def _activate(self, up: torch.Tensor) -> torch.Tensor:
        activation = self.spec.activation
        if self.spec.gated_mlp:
            if activation is Activation.SILU:
                return self.kernels.silu_mul(up)
            gate, up = up.chunk(2, dim=-1)
            return self._nonlinear(gate) * up
        return self._nonlinear(up)

    def _nonlinear(self, x: torch.Tensor) -> torch.Tensor:
        match self.spec.activation:
            case Activation.SILU:
                return F.silu(x)
            case Activation.GELU:
                return F.gelu(x)
            case Activation.GELU_TANH:
                return self.kernels.gelu_new(x)
            case Activation.RELU:
                return F.relu(x)

    def _no_logits(self, residual: torch.Tensor) -> torch.Tensor | None:
        """Every row of the step was an inner part of a prompt: its keys and values are all that counted."""
        if not self._is_first_rank:
            return None
        return residual.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
