"""From the files of a checkpoint to the weights of one rank: which spans of which tensors, fused how."""

from __future__ import annotations

import logging

import torch

from workers.kernels import Kernels, PackedLinear, Quantization, QuantizedWeight
from workers.kernels.quantized import stack
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.layers import DecoderWeights, Layer, Norm
from workers.model.lending import DRAFT_TOKEN_IDS
from workers.model.parallel import (
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from workers.model.rotary import Rotary
from workers.model.spec import check_tensor_parallel
from workers.model.weights import WeightReader

_log = logging.getLogger(__name__)


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel,
    kernels: Kernels,
    quantization: Quantization,
) -> DecoderWeights:
    """Reads and packs the weights of one rank. Errors as in `workers.model.decoder.load_decoder`."""
    check_tensor_parallel(checkpoint.spec, parallel.size)
    with WeightReader(checkpoint, dtype, device) as reader:
        weights = _Loader(checkpoint, reader, kernels, parallel, quantization, dtype).load(device)
    if reader.num_not_kept:
        _log.warning(
            "%s: %d matrices of rank %d are held in %s: their groups of inputs fit no form of few bits there",
            *(checkpoint.folder, reader.num_not_kept, parallel.rank, str(dtype).removeprefix("torch.")),
        )
    return weights


class _Loader:
    """Names, spans and packing of one rank's weights."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: WeightReader,
        kernels: Kernels,
        parallel: TensorParallel,
        quantization: Quantization,
        dtype: torch.dtype,
    ) -> None:
        spec = checkpoint.spec
        self._checkpoint = checkpoint
        self._spec = spec
        self._reader = reader
        self._kernels = kernels
        self._parallel = parallel
        self._quantization = quantization
        self._dtype = dtype
        rank, size = parallel.rank, parallel.size
        self._q_span = _scaled(spec.q_heads_of_rank(rank, size), spec.head_dim)
        self._kv_span = _scaled(spec.kv_heads_of_rank(rank, size), spec.head_dim)
        self._inner_span = spec.intermediate_of_rank(rank, size)
        self._vocab_span = spec.vocab_of_rank(rank, size)

    def load(self, device: torch.device) -> DecoderWeights:
        spec, checkpoint, names = self._spec, self._checkpoint, self._spec.weights
        size = self._parallel.size
        positions = None
        if spec.learned_positions:
            positions = self._reader.rows(checkpoint.stored_name(f"{names.prefix}{names.positions}.weight"))
        embedding = self._reader.rows(checkpoint.embedding_name, self._vocab_span)
        head = embedding if checkpoint.is_tied else self._head()
        widths, head_ids = [len(spec.vocab_of_rank(rank, size)) for rank in range(size)], None
        if checkpoint.has_draft_token_ids:
            assert size == 1, "a draft model is not split"
            chosen = self._reader.token_ids(DRAFT_TOKEN_IDS)
            values = head.values().to(self._dtype) if isinstance(head, QuantizedWeight) else head
            head, widths, head_ids = values[chosen.to(device)], [len(chosen)], tuple(chosen.tolist())
        # Before the layers: nothing but its packed form is kept of a head of its own.
        packed_head = self._pack(checkpoint.head_name, head, None, self._quantization.of_head, torch.float32)
        del head
        return DecoderWeights(
            embedding=VocabParallelEmbedding(embedding, self._vocab_span, self._parallel),
            positions=positions,
            rotary=Rotary(spec.rotary, device) if spec.rotary is not None else None,
            layers=tuple(self._layer(index) for index in range(spec.num_layers)),
            final_norm=self._norm(f"{names.prefix}{names.final_norm}"),
            head=VocabParallelHead(packed_head, tuple(widths), self._parallel),
            head_ids=head_ids,
        )

    def _layer(self, index: int) -> Layer:
        spec, names = self._spec, self._spec.weights

        def name(part: str) -> str:
            return names.of_layer(index, part)

        query_norm = key_norm = None
        if spec.qk_norm:
            query_norm = self._vector(f"{name(names.query_norm)}.weight")
            key_norm = self._vector(f"{name(names.key_norm)}.weight")
        return Layer(
            attention_norm=self._norm(name(names.attention_norm)),
            qkv=self._qkv(name(names.query), name(names.key), name(names.value)),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._row_parallel(name(names.output), self._q_span, spec.output_bias),
            mlp_norm=self._norm(name(names.mlp_norm)),
            up=self._up(name(names.gate) if spec.gated_mlp else None, name(names.up)),
            down=self._row_parallel(name(names.down), self._inner_span, spec.mlp_bias),
            scale=spec.attention_scale[index],
            sliding_window=spec.sliding_window[index],
        )

    def _qkv(self, query: str, key: str, value: str) -> PackedLinear:
        """One column-parallel matrix for the three projections of this rank's heads."""
        spec = self._spec
        if spec.weights.fused_qkv:
            q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
            spans = [
                self._q_span,
                _shifted(self._kv_span, q_size),
                _shifted(self._kv_span, q_size + kv_size),
            ]
            return self._column_parallel([(query, spans)], spec.qkv_bias)
        parts = [(query, [self._q_span]), (key, [self._kv_span]), (value, [self._kv_span])]
        return self._column_parallel(parts, spec.qkv_bias)

    def _up(self, gate: str | None, up: str) -> PackedLinear:
        """One column-parallel matrix for gate and up."""
        parts = [(name, [self._inner_span]) for name in (gate, up) if name is not None]
        return self._column_parallel(parts, self._spec.mlp_bias)

    def _column_parallel(self, parts: list[tuple[str, list[range]]], has_bias: bool) -> PackedLinear:
        """Some outputs of some matrices with equal inputs, one below the other."""
        matrices = [self._matrix(name, outputs=spans) for name, spans in parts]
        weight = _stacked(matrices, self._dtype)
        del matrices  # of several, `weight` is a copy
        bias = None
        if has_bias:
            bias = torch.cat([self._vector(f"{name}.bias", spans) for name, spans in parts])
        return self._pack(" and ".join(name for name, _ in parts), weight, bias, self._quantization)

    def _row_parallel(self, name: str, inputs: range, has_bias: bool) -> RowParallelLinear:
        """Some inputs of a matrix. Rank 0 brings the bias, so that the sum over ranks has it once."""
        bias = self._vector(f"{name}.bias") if has_bias and self._parallel.rank == 0 else None
        packed = self._pack(name, self._matrix(name, inputs=inputs), bias, self._quantization)
        return RowParallelLinear(packed, self._parallel)

    def _head(self) -> torch.Tensor | QuantizedWeight:
        name, rows = self._checkpoint.head_name, self._vocab_span
        return self._kept(name, [rows], None, self._quantization.of_head) or self._reader.rows(name, rows)

    def _pack(
        self,
        name: str,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        quantization: Quantization,
        out_dtype: torch.dtype | None = None,
    ) -> PackedLinear:
        """The layer of one weight. Quantized, its groups of inputs start where this rank's inputs start."""
        if isinstance(weight, QuantizedWeight):
            return self._kernels.pack_quantized(weight, bias, self._dtype, out_dtype)
        form = Quantization.NONE if quantization is Quantization.AUTO else quantization
        try:
            return self._kernels.pack_linear(weight, bias, out_dtype, form)
        except ValueError as error:
            raise CheckpointError(f"{self._checkpoint.folder}: {name}: {error}") from error

    def _norm(self, name: str) -> Norm:
        bias = self._vector(f"{name}.bias") if self._spec.norm_bias else None
        return Norm(self._kernels, self._vector(f"{name}.weight"), bias, self._spec.norm_eps)

    def _matrix(
        self, name: str, *, outputs: list[range] | None = None, inputs: range | None = None
    ) -> torch.Tensor | QuantizedWeight:
        stored = self._checkpoint.stored_name(f"{name}.weight")
        return self._kept(stored, outputs, inputs, self._quantization) or self._reader.matrix(
            stored, outputs=outputs, inputs=inputs, inputs_first=self._spec.weights.inputs_first
        )

    def _kept(
        self, stored: str, outputs: list[range] | None, inputs: range | None, wanted: Quantization
    ) -> QuantizedWeight | None:
        """The codes of the files, where they have any in the wanted form. In float32 there is nothing to gain
        from them: products take whole values there, and these are exact."""
        forms = self._checkpoint.kept
        is_auto = wanted is Quantization.AUTO
        if forms is None or (self._dtype is torch.float32 if is_auto else wanted.value not in forms):
            return None
        found = self._reader.kept(stored, outputs=outputs, inputs=inputs)
        return found if found is not None and (is_auto or found.quantization is wanted) else None

    def _vector(self, name: str, spans: list[range] | None = None) -> torch.Tensor:
        return self._reader.vector(self._checkpoint.stored_name(name), spans)


def _stacked(
    parts: list[torch.Tensor | QuantizedWeight], dtype: torch.dtype
) -> torch.Tensor | QuantizedWeight:
    """One below the other: with their codes where all are of one form, else as values."""
    if len(parts) == 1:
        return parts[0]
    coded = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(coded) == len(parts) and len({part.quantization for part in coded}) == 1:
        return stack(coded)
    return torch.cat(
        [part.values().to(dtype) if isinstance(part, QuantizedWeight) else part for part in parts]
    )


def _scaled(span: range, factor: int) -> range:
    return range(span.start * factor, span.stop * factor)


def _shifted(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)
