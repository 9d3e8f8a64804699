"""One matrix of a checkpoint, quantized a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workers.kernels import Quantization, QuantizedWeight
from workers.kernels.quantized import quantize
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.formats.packed_codes import pack_nibbles
from workers.model.weights import WeightReader
from workers.quantizing.stream_writer import PlannedTensor, StreamWriter
from workers.weight_forms import GROUP

_CHUNK = 1 << 23  # elements of a matrix in work at a time: 32 MB of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLoss:
    """How far the values of a quantized matrix are from those of the checkpoint."""

    name: str
    relative: float  # root of the sum of squared differences, over that of the squared weights


def planned_parts(stem: str, shape: tuple[int, int], form: Quantization) -> list[PlannedTensor]:
    """What is written in place of a matrix (outputs, inputs); see `workers.model.formats.layouts`."""
    outputs, inputs = shape
    if form is Quantization.INT8:
        return [
            PlannedTensor(name=f"{stem}.codes", dtype="I8", shape=(outputs, inputs)),
            PlannedTensor(name=f"{stem}.scales", dtype="F32", shape=(outputs,)),
        ]
    groups = (outputs, -(-inputs // GROUP))
    return [
        PlannedTensor(name=f"{stem}.codes", dtype="U8", shape=(outputs, -(-inputs // 2))),
        PlannedTensor(name=f"{stem}.scales", dtype="F16", shape=groups),
        PlannedTensor(name=f"{stem}.minima", dtype="F16", shape=groups),
    ]


class MatrixQuantizer:
    """Quantizes matrices of one checkpoint. Codes that it has in the wanted form already stay as they are."""

    def __init__(self, checkpoint: Checkpoint, reader: WeightReader) -> None:
        """reader: of `checkpoint`, in float32 on the CPU."""
        self._checkpoint = checkpoint
        self._reader = reader

    def write(self, name: str, stem: str, form: Quantization, writer: StreamWriter) -> MatrixLoss:
        """The matrix that a plain checkpoint has as `name`, as parts of `stem`. Raises CheckpointError for
        values that are not finite or that `form` does not hold, and OSError."""
        error = weight = 0.0
        for quantized, values in self._chunks(name, form):
            codes = quantized.codes
            writer.append(f"{stem}.codes", codes if form is Quantization.INT8 else pack_nibbles(codes))
            writer.append(f"{stem}.scales", quantized.scales)
            if quantized.minima is not None:
                writer.append(f"{stem}.minima", quantized.minima)
            error += float((quantized.values() - values).square_().sum(dtype=torch.float64))
            weight += float(values.square().sum(dtype=torch.float64))
        return MatrixLoss(name=f"{stem}.weight", relative=math.sqrt(error / weight) if weight else 0.0)

    def _chunks(self, name: str, form: Quantization) -> Iterator[tuple[QuantizedWeight, torch.Tensor]]:
        """(quantized rows, their values in the checkpoint), from the first to the last."""
        checkpoint, outputs = self._checkpoint, self._checkpoint.matrix_shape(name)[0]
        rows = max(1, _CHUNK // checkpoint.matrix_shape(name)[1])
        has_codes = checkpoint.kept is not None and form in checkpoint.kept
        for start in range(0, outputs, rows):
            spans = [range(start, min(start + rows, outputs))]
            values = self._reader.matrix(name, outputs=spans, inputs_first=checkpoint.is_inputs_first(name))
            kept = self._reader.kept(name, outputs=spans) if has_codes else None
            if kept is None or kept.quantization is not form:
                try:
                    kept = quantize(values, form)
                except ValueError as error:
                    raise CheckpointError(f"{checkpoint.folder}: {name}: {error}") from error
            yield kept, values
