"""A whole step in one call of C++: all layers, from the embedded rows to the logits.

Gives the same bits as the operators called one by one, and keeps no weights of its own: it holds the packed
linears and norms of the decoder and hands their addresses over.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_double, c_long, c_void_p

import torch

from workers.kernels.arguments import check_batch, check_turn
from workers.kernels.batch import StepBatch
from workers.kernels.interface import PackedLinear, StepLayer, StepModel
from workers.kernels.library import Library
from workers.kernels.memory import huge_bytes
from workers.kernels.packed import NativeLinear, PackedWeights

MAX_KEPT_ROWS = 128  # of logits; more, as scores of a prompt need, are allocated anew


class LayerWeights(ctypes.Structure):
    """As in cpu/step.h."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("qkv", PackedWeights),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", PackedWeights),
        ("mlp_norm", c_void_p),
        ("up", PackedWeights),
        ("down", PackedWeights),
        ("window", c_long),
        ("scale", c_double),
    ]


class Model(ctypes.Structure):
    """As in cpu/step.h."""

    _fields_ = [
        *[(name, c_long) for name in ("hidden", "heads", "kv_heads", "d", "inner", "num_layers", "vocab")],
        ("eps", c_double),
        ("layers", ctypes.POINTER(LayerWeights)),
        ("final_norm", c_void_p),
        ("head", PackedWeights),
        ("collective", c_void_p),
    ]


class StepInput(ctypes.Structure):
    """As in cpu/step.h."""

    _fields_ = [
        ("residual", c_void_p),
        ("tokens", c_long),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_long),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("tables", c_void_p),
        ("num_sequences", c_long),
        ("table_width", c_long),
        ("pool", c_void_p),
        *[(name, c_long) for name in ("block_stride", "head_stride", "layer_stride", "block_size")],
        ("logit_rows", c_void_p),
        ("num_logits", c_long),
        ("logits", c_void_p),
    ]


class NativeStep:
    """Implements FusedStep. One step at a time: it owns the buffers between the layers."""

    def __init__(self, library: Library, model: StepModel) -> None:
        """Only for models that `can_fuse` accepts."""
        self._library = library
        self._model = model  # keeps the tensors alive whose addresses are below
        self._layers = (LayerWeights * len(model.layers))(*map(_layer, model.layers))
        first = model.layers[0]
        self._vocab = _native(model.head).out_features
        self._shape = Model(
            hidden=_native(first.qkv).in_features,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            d=model.head_dim,
            inner=_native(first.down).in_features,
            num_layers=len(model.layers),
            vocab=self._vocab,
            eps=model.norm_eps,
            layers=self._layers,
            final_norm=_norm(model.final_norm),
            head=_native(model.head).weights(),
            collective=None if model.collective is None else model.collective.address,
        )
        self._logits = torch.empty((0, self._vocab), dtype=torch.float32)
        self._scratch: int = library.step_scratch()
        # Not at exit: a thread that ends with the process may still be inside a step.
        weakref.finalize(self, library.free_step_scratch, self._scratch).atexit = False

    def __call__(
        self,
        residual: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        batch: StepBatch,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        assert residual.is_contiguous() and residual.dtype == kv.dtype == torch.bfloat16
        assert residual.shape[1] == self._shape.hidden, (residual.shape, self._shape.hidden)
        check_batch(batch, residual.shape[0])
        check_turn(cos, sin, residual.shape[0], self._shape.d)
        num_logits = batch.logit_rows.shape[0]
        logits = self._space_for(num_logits)
        half = 0
        if cos is not None and sin is not None:
            cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
        if residual.shape[0] == 0:
            return logits
        inputs = StepInput(
            residual=residual.data_ptr(),
            tokens=residual.shape[0],
            cos=None if cos is None else cos.data_ptr(),
            sin=None if sin is None else sin.data_ptr(),
            half=half,
            slots=batch.slots.data_ptr(),
            query_starts=batch.query_starts.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            num_sequences=batch.context_lens.shape[0],
            table_width=batch.block_tables.shape[1],
            pool=kv.data_ptr(),
            block_stride=kv.stride(0),
            head_stride=kv.stride(1),
            layer_stride=kv.stride(2),
            block_size=kv.shape[4],
            logit_rows=batch.logit_rows.data_ptr(),
            num_logits=num_logits,
            logits=logits.data_ptr(),
        )
        self._library.step(
            ctypes.addressof(self._shape), ctypes.addressof(inputs), self._scratch, torch.get_num_threads()
        )
        if self._model.collective is not None:
            self._model.collective.check()
        return logits

    def _space_for(self, num_logits: int) -> torch.Tensor:
        """Rows for logits, mostly those of the step before: new memory costs a page fault every 4 KiB."""
        if num_logits > MAX_KEPT_ROWS:
            return torch.empty((num_logits, self._vocab), dtype=torch.float32)
        if num_logits > self._logits.shape[0]:
            space = huge_bytes(num_logits * self._vocab * self._logits.itemsize)
            self._logits = space.view(torch.float32).view(num_logits, self._vocab)
        return self._logits[:num_logits]


def can_fuse(library: Library, model: StepModel, dtype: torch.dtype) -> bool:
    """Whether every part of the model is in the form that the C++ step knows."""
    if not library.has_linear or dtype != torch.bfloat16 or not model.layers:
        return False
    linears: list[PackedLinear] = [model.head]
    for layer in model.layers:
        linears += (layer.qkv, layer.output, layer.up, layer.down)
    return all(isinstance(linear, NativeLinear) for linear in linears) and (
        _native(model.head).out_dtype == torch.float32
    )


def _layer(layer: StepLayer) -> LayerWeights:
    return LayerWeights(
        attention_norm=_norm(layer.attention_norm),
        qkv=_native(layer.qkv).weights(),
        query_norm=None if layer.query_norm is None else _norm(layer.query_norm),
        key_norm=None if layer.key_norm is None else _norm(layer.key_norm),
        output=_native(layer.output).weights(),
        mlp_norm=_norm(layer.mlp_norm),
        up=_native(layer.up).weights(),
        down=_native(layer.down).weights(),
        window=layer.sliding_window or 0,
        scale=layer.scale,
    )


def _norm(weight: torch.Tensor) -> int:
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous(), (weight.dtype, weight.stride())
    return weight.data_ptr()


def _native(linear: PackedLinear) -> NativeLinear:
    assert isinstance(linear, NativeLinear), "can_fuse() looked at every linear"
    return linear
