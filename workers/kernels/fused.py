"""A whole step in one call of C++, from its message to logits and drawn ids.

Gives the same bits as the operators called one by one, and keeps no weights of its own: it holds the packed
linears and norms of the decoder and hands their addresses over.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_long, c_void_p
from typing import NoReturn

import torch

from workers.kernels.batch import build_batch
from workers.kernels.draw import Draw, pack_draws
from workers.kernels.interface import (
    Drawn,
    LogitsPart,
    PackedLinear,
    PartLinear,
    RankPart,
    StepLayer,
    StepModel,
    Turn,
)
from workers.kernels.library import Library
from workers.kernels.memory import MAX_KEPT_ROWS, KeptRows
from workers.kernels.order import NativeNodeOrder, NodeOrder, native_nodes
from workers.kernels.packed import NativeLinear, PackedWeights
from workers.kernels.paged_cache import PagedCache
from workers.kernels.step_message import StepMessage, header_of, unpack

_ANY_POSITION = 1 << 31  # where nothing turns, a context ends with the pool


class LayerWeights(ctypes.Structure):
    """As in cpu/step_model.h."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("qkv", PackedWeights),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", PackedWeights),
        ("output_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("up", PackedWeights),
        ("down", PackedWeights),
        ("down_bias", c_void_p),
        ("window", c_long),
        ("scale", c_double),
    ]


class NativePart(ctypes.Structure):
    """AttentionPart in cpu/step_model.h."""

    _fields_ = [
        ("pool", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("heads", c_long),
        ("kv_heads", c_long),
    ]


class NativeLogits(ctypes.Structure):
    """LogitsPart in cpu/step_model.h."""

    _fields_ = [
        ("logits", c_void_p),
        ("draws", c_void_p),
        ("ids", c_void_p),
        ("rows", c_long),
        ("width", c_long),
        ("first_column", c_long),
    ]


class Model(ctypes.Structure):
    """As in cpu/step_model.h."""

    _fields_ = [
        *[
            (name, c_long)
            for name in ("hidden", "heads", "kv_heads", "d", "inner", "num_layers", "vocab_size")
        ],
        ("eps", c_double),
        ("embedding", c_void_p),
        ("first_id", c_long),
        ("num_ids", c_long),
        ("layers", ctypes.POINTER(LayerWeights)),
        ("final_norm", c_void_p),
        ("head", PackedWeights),
        ("collective", c_void_p),
        ("output_nodes", NativeNodeOrder),
        ("down_nodes", NativeNodeOrder),
        ("parts", ctypes.POINTER(NativePart)),
        ("part_tokens", c_long),
        ("together", NativeLogits),
    ]


class StepInput(ctypes.Structure):
    """As in cpu/step_model.h."""

    _fields_ = [
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_positions", c_long),
        ("half", c_long),
        ("pool", c_void_p),
        *[
            (name, c_long)
            for name in (
                *("is_int8", "num_blocks", "head_stride", "layer_stride"),
                *("value_stride", "block_size"),
            )
        ],
        ("logits", c_void_p),
        ("draws", c_void_p),
        ("ids", c_void_p),
        ("hidden", c_void_p),
        ("ids_only", c_long),
    ]


class NativeStep:
    """Implements FusedStep. One step at a time: it owns the buffers between the layers."""

    def __init__(self, library: Library, model: StepModel) -> None:
        """Only for models that `can_fuse` accepts."""
        self._library = library
        self._model = model  # keeps the tensors alive whose addresses are below
        self._layers = (LayerWeights * len(model.layers))(*map(_layer, model.layers))
        first = model.layers[0]
        self._shape = Model(
            hidden=_native(first.qkv).in_features,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            d=model.head_dim,
            inner=_native(first.down).in_features,
            num_layers=len(model.layers),
            vocab_size=model.vocab_size,
            eps=model.norm_eps,
            embedding=_address(model.embedding),
            first_id=model.first_id,
            num_ids=model.embedding.shape[0],
            layers=self._layers,
            final_norm=_address(model.final_norm),
            head=_native(model.head).weights(),
            collective=None if model.collective is None else model.collective.address,
            output_nodes=_nodes(model.output_nodes),
            down_nodes=_nodes(model.down_nodes),
        )
        self._logits = self._whole_logits = KeptRows(_native(model.head).out_features)
        self._hidden = KeptRows(self._shape.hidden, torch.bfloat16)
        self._inputs = StepInput()
        self._addresses = ctypes.addressof(self._shape), ctypes.addressof(self._inputs)
        self._draws: Sequence[Draw] = ()  # of the step before, as the two after it
        self._how = pack_draws(())
        self._ids = array("q")
        self._kv: PagedCache | None = None
        self._turn: Turn | None = None
        self._parts: tuple[RankPart, ...] = ()
        self._native_parts = (NativePart * 0)()
        self._scratch: int = library.step_scratch()
        # Not at exit: a thread that ends with the process may still be inside a step.
        weakref.finalize(self, library.free_step_scratch, self._scratch).atexit = False

    def __call__(
        self,
        message: StepMessage,
        turn: Turn | None,
        kv: PagedCache,
        draws: Sequence[Draw] = (),
        *,
        ids_only: bool = False,
    ) -> Drawn:
        header = header_of(message)
        num_logits = header.num_logit_rows
        kept = self._whole_logits if self.shares_logits(num_logits) else self._logits
        logits, hidden = kept.take(num_logits), self._hidden.take(num_logits)
        if header.num_tokens == 0:
            return Drawn(logits.values, [], hidden.values)
        if kv is not self._kv or turn is not self._turn:
            self._bind(turn, kv)
        assert len(draws) in (0, num_logits), f"{len(draws)} draws for {num_logits} rows"
        if draws != self._draws:  # greedy ones are what they were
            self._bind_draws(draws)
        inputs = self._inputs
        inputs.logits, inputs.hidden, inputs.ids_only = logits.address, hidden.address, ids_only
        is_done = self._library.step(
            *self._addresses, message, len(message) // 4, self._scratch, torch.get_num_threads()
        )
        if not is_done:
            self._refuse(message)
        if self._model.collective is not None:
            self._model.collective.check()
        return Drawn(logits.values, self._ids.tolist(), hidden.values)

    def share(self, parts: tuple[RankPart, ...], max_tokens: int) -> None:
        shape = self._shape
        assert self._model.collective is not None, "a rank alone has nobody to share with"
        for part in parts:  # all have tasks of one size
            assert part.num_heads * shape.kv_heads == shape.heads * part.num_kv_heads, part
        self._parts = parts  # keeps their memory mapped
        self._native_parts = (NativePart * len(parts))(
            *(_native_part(part, max_tokens, shape.d) for part in parts)
        )
        shape.parts, shape.part_tokens = self._native_parts, max_tokens
        if (together := parts[0].logits) is not None:
            self._whole_logits = KeptRows(together.logits.shape[1], space=together.logits)
            shape.together = self._native_logits(together)

    def shares_logits(self, num_rows: int) -> bool:
        return bool(0 < num_rows <= self._shape.together.rows)

    def _native_logits(self, part: LogitsPart) -> NativeLogits:
        collective, widths = self._model.collective, self._model.head_widths
        assert collective is not None and widths[collective.rank] == self._shape.head.columns, widths
        rows, width = part.logits.shape
        assert rows <= MAX_KEPT_ROWS, rows  # of more rows KeptRows hands out other memory than this
        assert width == sum(widths) and part.ids.shape == (rows,), (part.logits.shape, part.ids.shape)
        assert part.draws.shape == (rows, len(Draw._fields)), part.draws.shape
        addresses = (each.data_ptr() for each in part)
        return NativeLogits(*addresses, rows, width, sum(widths[: collective.rank]))

    def _bind(self, turn: Turn | None, kv: PagedCache) -> None:
        """Has the next steps use these; mostly they are those of the step before."""
        numbers = kv.numbers
        assert numbers.dtype in (torch.bfloat16, torch.int8), numbers.dtype
        self._kv, self._turn, inputs = kv, turn, self._inputs
        inputs.pool, inputs.num_blocks, inputs.block_size = numbers.data_ptr(), kv.num_blocks, kv.block_size
        inputs.is_int8 = kv.scales is not None
        inputs.head_stride, inputs.layer_stride, inputs.value_stride = numbers.stride()[1:4]
        assert numbers.stride(0) == numbers.shape[1] * inputs.head_stride, numbers.stride()
        if turn is None:
            inputs.cos, inputs.sin, inputs.num_positions, inputs.half = None, None, _ANY_POSITION, 0
            return
        cos, sin = turn
        assert cos.dtype == sin.dtype == torch.float32, (cos.dtype, sin.dtype)
        assert cos.shape == sin.shape and 2 * cos.shape[1] <= self._shape.d, (cos.shape, sin.shape)
        assert cos.is_contiguous() and sin.is_contiguous(), (cos.stride(), sin.stride())
        inputs.cos, inputs.sin = cos.data_ptr(), sin.data_ptr()
        inputs.num_positions, inputs.half = cos.shape

    def _bind_draws(self, draws: Sequence[Draw]) -> None:
        """Has the next steps draw like this."""
        self._draws, self._how, self._ids = draws, pack_draws(draws), array("q", bytes(8 * len(draws)))
        self._inputs.draws = self._how.buffer_info()[0] if draws else None
        self._inputs.ids = self._ids.buffer_info()[0]

    def _refuse(self, message: StepMessage) -> NoReturn:
        """Raises ValueError that says what is wrong."""
        inputs = self._inputs
        batch = build_batch(
            unpack(message),
            block_size=inputs.block_size,
            num_blocks=inputs.num_blocks,
            vocab_size=self._model.vocab_size,
            device=torch.device("cpu"),
        )
        raise ValueError(
            f"step with a context of {batch.max_context_len} tokens, turns are known up to "
            f"{inputs.num_positions}"
        )


def can_fuse(library: Library, model: StepModel, dtype: torch.dtype) -> bool:
    """Whether every part of the model is in the form that the C++ step knows."""
    if not library.has_linear or dtype != torch.bfloat16 or not model.layers:
        return False
    linears: list[PackedLinear | PartLinear] = [model.head]
    for layer in model.layers:
        linears += (layer.qkv, layer.output, layer.up, layer.down)
    return all(isinstance(linear, NativeLinear) for linear in linears) and (
        _native(model.head).out_dtype == torch.float32
    )


def _layer(layer: StepLayer) -> LayerWeights:
    return LayerWeights(
        attention_norm=_address(layer.attention_norm),
        qkv=_native(layer.qkv).weights(),
        query_norm=None if layer.query_norm is None else _address(layer.query_norm),
        key_norm=None if layer.key_norm is None else _address(layer.key_norm),
        output=_native(layer.output).weights(),
        output_bias=None if layer.output_bias is None else layer.output_bias.data_ptr(),
        mlp_norm=_address(layer.mlp_norm),
        up=_native(layer.up).weights(),
        down=_native(layer.down).weights(),
        down_bias=None if layer.down_bias is None else layer.down_bias.data_ptr(),
        window=layer.sliding_window or 0,
        scale=layer.scale,
    )


def _native_part(part: RankPart, max_tokens: int, head_dim: int) -> NativePart:
    qkv_bytes = max_tokens * (part.num_heads + 2 * part.num_kv_heads) * head_dim * 2
    assert part.work.nbytes >= qkv_bytes + max_tokens * part.num_heads * head_dim * 2, part.work.nbytes
    qkv = part.work.data_ptr()
    return NativePart(part.pool.data_ptr(), qkv, qkv + qkv_bytes, part.num_heads, part.num_kv_heads)


def _address(weight: torch.Tensor) -> int:
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous(), (weight.dtype, weight.stride())
    return weight.data_ptr()


def _nodes(order: NodeOrder | None) -> NativeNodeOrder:
    return NativeNodeOrder() if order is None else native_nodes(order)


def _native(linear: PackedLinear | PartLinear) -> NativeLinear:
    assert isinstance(linear, NativeLinear), "can_fuse() looked at every linear"
    return linear
