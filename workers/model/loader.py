"""From the files of a checkpoint to the weights of one rank: which spans of which tensors, fused how."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from workers.kernels import (
    Kernels,
    PackedLinear,
    Quantization,
    QuantizedWeight,
    SumOrder,
    TorchKernels,
    one_leaf,
)
from workers.kernels.quantized import quantize, stack
from workers.model.architecture import ExpertsSpec, LayerOrder, NormKind, NormPlaces, QkNorm
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.experts import ExpertMlp, Router
from workers.model.layers import DecoderWeights, Layer
from workers.model.lending import DRAFT_TOKEN_IDS
from workers.model.mlp import DenseMlp, Mlp
from workers.model.norms import HeadNorms, LayerNorm, NoNorm, Norm, QueryKeyNorm, RmsNorm, WidthNorms
from workers.model.orders import RankOrder, RankOrders, order_of_experts, orders_of_rank
from workers.model.parallel import (
    OrderedLinear,
    RowParallel,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from workers.model.rotary import Rotary
from workers.model.spans import spans_of_rank
from workers.model.spec import check_tensor_parallel
from workers.model.weights import Parts, WeightReader

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
        loader = _Loader(checkpoint, reader, kernels, parallel, quantization, dtype)
        weights = loader.load(device)
    if loader.num_not_kept:
        is_auto = quantization is Quantization.AUTO
        form = str(dtype).removeprefix("torch.") if is_auto else f"{quantization.value}, rounded once more"
        _log.warning(
            "%s: %d matrices of rank %d are held in %s: their codes, or what is held with them, fit no form "
            "of few bits there",
            *(checkpoint.folder, loader.num_not_kept, parallel.rank, form),
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
        self._spans = spans_of_rank(spec, parallel.rank, parallel.size)
        # With an offset, weights are near it: bfloat16 would round away what tells them from it.
        self._norm_dtype = torch.float32 if spec.norm_offset else dtype
        self._norm_kernels = kernels if self._norm_dtype == dtype else TorchKernels()
        self._orders: RankOrders | None = None  # of row-parallel products; None: as kernels like
        kept = checkpoint.kept
        self._keeps_layers = kept is not None and self._keeps(quantization, kept.layers)
        self._keeps_head = kept is not None and self._keeps(quantization.of_head, kept.head)
        self.num_not_kept = 0  # matrices whose codes were wanted as the files have them, and could not stay

    def load(self, device: torch.device) -> DecoderWeights:
        spec, checkpoint, names = self._spec, self._checkpoint, self._spec.weights
        size = self._parallel.size
        if device.type == "cpu":  # a GPU's products and collectives take orders of their own
            self._orders = orders_of_rank(spec, self._parallel.rank, size)
        if not names.inputs_first:
            self._reader.expect([self._stored(parts) for parts in self._matrices()])
        positions = None
        if spec.learned_positions:
            positions = self._reader.rows(checkpoint.stored_name(f"{names.prefix}{names.positions}.weight"))
        embedding = self._reader.rows(checkpoint.embedding_name, self._spans.vocab)
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
            embedding=VocabParallelEmbedding(embedding, self._spans.vocab, self._parallel),
            positions=positions,
            rotaries=tuple(Rotary(rotary, device) for rotary in spec.rotaries),
            layers=tuple(self._layer(index) for index in range(spec.num_layers)),
            final_norm=self._norm(f"{names.prefix}{names.final_norm}"),
            head=VocabParallelHead(packed_head, tuple(widths), self._parallel),
            head_ids=head_ids,
        )

    def _matrices(self) -> Iterator[Sequence[tuple[str, Sequence[range]]]]:
        """As `_joined` will be asked for those of all layers, but for experts, which are small and many."""
        spec, names = self._spec, self._spec.weights
        for index in range(spec.num_layers):
            yield [(names.of_layer(index, part), spans) for part, spans in self._spans.qkv]
            yield [(names.of_layer(index, names.output), ())]
            if spec.experts_of_layer(index) is None:
                yield [(names.of_layer(index, part), spans) for part, spans in self._spans.up]
                yield [(names.of_layer(index, names.down), ())]

    def _layer(self, index: int) -> Layer:
        spec, names = self._spec, self._spec.weights

        def name(part: str) -> str:
            return names.of_layer(index, part)

        is_before, is_after = (
            spec.norm_places is not NormPlaces.AFTER,
            spec.norm_places is not NormPlaces.BEFORE,
        )
        mlp_norm: Norm | None = None
        if spec.order is not LayerOrder.PARALLEL_ONE_NORM:
            mlp_norm = self._norm(name(names.mlp_norm)) if is_before else NoNorm()
        rotary = spec.rotary[index]
        return Layer(
            attention_norm=self._norm(name(names.attention_norm)) if is_before else NoNorm(),
            qkv=self._column_parallel(
                [(name(part), spans) for part, spans in self._spans.qkv], spec.qkv_bias
            ),
            query_key_norm=self._query_key_norm(name(names.query_norm), name(names.key_norm)),
            rotary=None if rotary is None else spec.rotaries.index(rotary),
            scale=spec.attention_scale[index],
            sliding_window=spec.sliding_window[index],
            output=self._row_parallel(
                name(names.output),
                self._spans.queries,
                spec.output_bias,
                None if self._orders is None else self._orders.output,
            ),
            attention_post_norm=self._norm(name(names.attention_post_norm)) if is_after else None,
            mlp_norm=mlp_norm,
            mlp=self._mlp(index),
            mlp_post_norm=self._norm(name(names.mlp_post_norm)) if is_after else None,
        )

    def _mlp(self, index: int) -> Mlp:
        spec, names = self._spec, self._spec.weights
        experts = spec.experts_of_layer(index)
        if experts is not None:
            return self._experts(index, experts)
        up = [(names.of_layer(index, part), spans) for part, spans in self._spans.up]
        return DenseMlp(
            kernels=self._kernels,
            activation=spec.activation,
            is_gated=spec.gated_mlp,
            up=self._column_parallel(up, spec.mlp_bias),
            down=self._row_parallel(
                names.of_layer(index, names.down),
                self._spans.inner,
                spec.mlp_bias,
                None if self._orders is None else self._orders.down,
            ),
        )

    def _experts(self, index: int, experts: ExpertsSpec) -> ExpertMlp:
        names = self._spec.weights
        router = names.of_layer(index, names.router)
        gate = self._reader.matrix(self._checkpoint.stored_name(f"{router}.weight"))
        rank, size = self._parallel.rank, self._parallel.size
        own, order = experts.of_rank(rank, size), None
        if self._orders is not None:
            order = order_of_experts(experts.num_experts, rank, size)
        return ExpertMlp(
            router=Router(
                # Few weights that decide much: never in few bits.
                gate=self._pack(router, gate, None, Quantization.NONE, torch.float32),
                num_per_token=experts.num_per_token,
                is_renormalized=experts.is_renormalized,
            ),
            experts=tuple(self._expert(names.of_layer(index, names.expert.format(number))) for number in own),
            first_id=own.start,
            num_experts=experts.num_experts,
            order=one_leaf(len(own)) if order is None else order.part,
            nodes=None if order is None or size == 1 else order.nodes,
        )

    def _expert(self, prefix: str) -> DenseMlp:
        """One of them, whole."""
        names, down = self._spec.weights, prefix + self._spec.weights.expert_down
        return DenseMlp(
            kernels=self._kernels,
            activation=self._spec.activation,
            is_gated=True,
            up=self._column_parallel(
                [(prefix + names.expert_gate, ()), (prefix + names.expert_up, ())], has_bias=False
            ),
            down=self._pack(down, self._joined([(down, ())]), None, self._quantization),
        )

    def _query_key_norm(self, query: str, key: str) -> QueryKeyNorm | None:
        spec = self._spec
        match spec.qk_norm:
            case QkNorm.NONE:
                return None
            case QkNorm.HEADS:
                weights = self._norm_weight(query), self._norm_weight(key)
                return HeadNorms(self._norm_kernels, *weights, spec.norm_eps)
            case QkNorm.WIDTH:
                return WidthNorms(
                    self._parallel,
                    spec,
                    self._norm_weight(query, self._spans.queries),
                    self._norm_weight(key, self._spans.keys),
                )

    def _column_parallel(self, parts: list[tuple[str, tuple[range, ...]]], has_bias: bool) -> PackedLinear:
        """Some outputs of some matrices with equal inputs, one below the other."""
        weight = self._joined(parts)
        bias = None
        if has_bias:
            bias = torch.cat([self._vector(f"{name}.bias", spans) for name, spans in parts])
        return self._pack(" and ".join(name for name, _ in parts), weight, bias, self._quantization)

    def _row_parallel(self, name: str, inputs: range, has_bias: bool, order: RankOrder | None) -> RowParallel:
        """Some inputs of a matrix, added up in `order`, or as kernels and collectives like."""
        matrix, rank = self._some_inputs(name, inputs), self._parallel.rank
        bias = self._vector(f"{name}.bias") if has_bias else None
        if order is not None and self._parallel.size > 1:
            part = self._kernels.pack_part(matrix, self._dtype, order.part)
            return OrderedLinear(part, order.nodes, bias, self._dtype)
        # Rank 0 brings the bias, so that the sum over ranks has it once.
        whole = None if order is None else order.part
        return self._pack(name, matrix, bias if rank == 0 else None, self._quantization, order=whole)

    def _some_inputs(self, name: str, inputs: range) -> torch.Tensor | QuantizedWeight:
        """A part of a matrix. What is quantized here has scales of the whole matrix, so the same codes for
        every number of ranks; the whole is read for it."""
        if self._quantization in (Quantization.NONE, Quantization.AUTO):
            return self._joined([(name, ())], inputs)
        whole = self._joined([(name, ())])
        if isinstance(whole, QuantizedWeight):
            return whole.part(inputs)
        return self._quantized(name, whole, self._quantization, inputs)

    def _head(self) -> torch.Tensor | QuantizedWeight:
        name, rows = self._checkpoint.head_name, self._spans.vocab
        if self._keeps_head:
            kept = self._kept(name, [rows], None, self._quantization.of_head)
            if kept is not None:
                return kept
            self.num_not_kept += self._checkpoint.stem(name) is not None
        return self._reader.rows(name, rows)

    def _pack(
        self,
        name: str,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        quantization: Quantization,
        out_dtype: torch.dtype | None = None,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        """The layer of one weight."""
        if isinstance(weight, torch.Tensor):
            if quantization in (Quantization.NONE, Quantization.AUTO):
                return self._kernels.pack_linear(weight, bias, out_dtype, order=order)
            weight = self._quantized(name, weight, quantization)
        return self._kernels.pack_quantized(weight, bias, self._dtype, out_dtype, order)

    def _quantized(
        self, name: str, weight: torch.Tensor, form: Quantization, inputs: range | None = None
    ) -> QuantizedWeight:
        try:
            return quantize(weight, form, inputs)
        except ValueError as error:
            raise CheckpointError(f"{self._checkpoint.folder}: {name}: {error}") from error

    def _norm(self, name: str) -> Norm:
        weight, eps = self._norm_weight(name), self._spec.norm_eps
        if self._spec.norm is NormKind.RMS:
            return RmsNorm(self._norm_kernels, weight, eps)
        bias = self._vector(f"{name}.bias") if self._spec.norm_bias else None
        return LayerNorm(self._norm_kernels, weight, bias, eps)

    def _norm_weight(self, name: str, span: range | None = None) -> torch.Tensor:
        stored = self._vector(f"{name}.weight", None if span is None else (span,), self._norm_dtype)
        return stored + self._spec.norm_offset if self._spec.norm_offset else stored

    def _joined(
        self, parts: Sequence[tuple[str, Sequence[range]]], inputs: range | None = None
    ) -> torch.Tensor | QuantizedWeight:
        """Some outputs of some matrices, one below the other: with the codes of the files where all of them
        have some of one form, else as values. Without spans: all outputs."""
        stored = self._stored(parts)
        if self._keeps_layers:
            kept = [self._kept(name, spans, inputs, self._quantization) for name, spans in stored]
            coded = [weight for weight in kept if weight is not None]
            if len(coded) == len(kept) and len({weight.quantization for weight in coded}) == 1:
                return stack(coded)
            self.num_not_kept += sum(self._checkpoint.stem(name) is not None for name, _ in stored)
        return self._reader.joined(stored, inputs=inputs, inputs_first=self._spec.weights.inputs_first)

    def _stored(self, parts: Sequence[tuple[str, Sequence[range]]]) -> Parts:
        """As the files call them."""
        return [(self._checkpoint.stored_name(f"{name}.weight"), spans or None) for name, spans in parts]

    def _kept(
        self, stored: str, outputs: Sequence[range] | None, inputs: range | None, wanted: Quantization
    ) -> QuantizedWeight | None:
        """The codes of the files, where they have any in the wanted form."""
        found = self._reader.kept(stored, outputs=outputs, inputs=inputs)
        is_wanted = wanted is Quantization.AUTO or (found is not None and found.quantization is wanted)
        return found if is_wanted else None

    def _keeps(self, wanted: Quantization, stored: Quantization) -> bool:
        """Whether codes stay that the files have in the form `stored`. In float32 there is nothing to gain
        from codes that nobody asked for: products take whole values there, and these are exact."""
        if wanted is Quantization.AUTO:
            return self._dtype is not torch.float32
        return wanted is stored

    def _vector(
        self, name: str, spans: Sequence[range] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._reader.vector(self._checkpoint.stored_name(name), spans, dtype)
