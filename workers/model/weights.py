"""Reading the part of a checkpoint's weights that one rank holds.

A rank reads only its own rows or columns of a matrix, straight out of the file. Every value is checked: a
weight that is not finite would turn all answers of the group into noise. Matrices that the files hold in few
bits come as values, or in a form of the kernels with the same codes (`kept`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

import torch

from workers.host_memory import available_host_bytes
from workers.kernels import QuantizedWeight
from workers.kernels.memory import huge_bytes
from workers.kernels.quantized import stack
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.formats.reading import Span, StoredWeight, read_part
from workers.model.lending import check_ids
from workers.model.tensor_files import DTYPES, TensorFiles

Parts = Sequence[tuple[str, Sequence[range] | None]]
"""Matrices that become one: the name of each, and spans of its outputs; None: all."""

_LARGE_BYTES = 4 << 20
_log = logging.getLogger(__name__)


class WeightReader:
    """Reads tensors of a checkpoint as `dtype` on `device`. A context manager: files stay open inside."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        # Both the files and what is made of them: else what is over would be kept at the cost of what comes.
        fit = 2 * checkpoint.weight_bytes <= available_host_bytes()
        self._files = TensorFiles(checkpoint.tensors, stay_cached=fit)
        self._followers: dict[str, Parts] = {}  # what is read after a matrix, or after several in one

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def expect(self, matrices: Sequence[Parts]) -> None:
        """In this order `joined` will be asked for them: while one is read and worked on, the system fetches
        the next. Of matrices with outputs in rows; what is in few bits in the files is left to the system."""
        self._followers = {parts[0][0]: following for parts, following in pairwise(matrices)}

    def vector(
        self, name: str, spans: Sequence[range] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A one-dimensional tensor, or the given spans of it one after the other. dtype: of the result; None:
        as all others."""
        return self._checked(name, [self._files.part(name, span) for span in spans or (None,)], dtype)

    def token_ids(self, name: str) -> torch.Tensor:
        """A vector of integers that are token ids, in rising order, int64. Raises CheckpointError."""
        found: torch.Tensor = self._files.part(name).long()
        check_ids(self._checkpoint.tensors[name].file, found.tolist(), self._checkpoint.vocab_size)
        return found

    def rows(self, name: str, span: range | None = None) -> torch.Tensor:
        """Rows of a matrix as it lies in the file: an embedding or a head."""
        if self._checkpoint.stem(name) is not None:
            return self._checked(name, [part.values() for part in self._parts(name, [span], None)])
        return self._checked(name, [self._files.part(name, span)])

    def matrix(
        self,
        name: str,
        *,
        outputs: Sequence[range] | None = None,
        inputs: range | None = None,
        inputs_first: bool = False,
    ) -> torch.Tensor:
        """A linear weight as (outputs, inputs), contiguous: all of it, spans of its outputs, or some inputs.

        inputs_first: it lies as (inputs, outputs) in the file.
        """
        return self.joined([(name, outputs)], inputs=inputs, inputs_first=inputs_first)

    def joined(
        self,
        parts: Parts,
        *,
        inputs: range | None = None,
        inputs_first: bool = False,
    ) -> torch.Tensor:
        """As `matrix`, of several with equal inputs, one below the other: names, and spans of their outputs.

        Nothing is in memory twice, where the files have the wanted dtype.
        """
        pieces = self._pieces(parts)
        for name, span in self._pieces(self._followers.get(parts[0][0], ())):
            if self._checkpoint.stem(name) is None:
                self._files.fetch(name, span)
        width = self._checkpoint.matrix_shape(parts[0][0])[1] if inputs is None else len(inputs)
        whole = _room(sum(len(span) for _, span in pieces), width, self._dtype)
        at = 0
        for name, span in pieces:
            piece = whole[at : at + len(span)]
            self._read_into(piece, name, span, inputs, inputs_first)
            self._check(name, piece)
            at += len(span)
        return whole.to(self._device)

    def _pieces(self, parts: Parts) -> list[tuple[str, range]]:
        """Each a span of outputs."""
        return [
            (name, span)
            for name, outputs in parts
            for span in (outputs or [range(self._checkpoint.matrix_shape(name)[0])])
        ]

    def _read_into(
        self, piece: torch.Tensor, name: str, span: range, inputs: range | None, inputs_first: bool
    ) -> None:
        """Some outputs of a matrix; piece (outputs, inputs), contiguous."""
        if self._checkpoint.stem(name) is not None:
            (stored,) = self._parts(name, [span], inputs)
            piece.copy_(stored.values())
        elif inputs_first:
            piece.copy_(self._files.part(name, inputs, span).T)
        elif DTYPES[self._checkpoint.entries[name].dtype] is self._dtype:
            self._files.part(name, span, inputs, out=piece)
        else:
            piece.copy_(self._files.part(name, span, inputs))

    def kept(
        self, name: str, *, outputs: Sequence[range] | None = None, inputs: range | None = None
    ) -> QuantizedWeight | None:
        """The part of a matrix with the codes that the files have; None where no form of the kernels holds
        them, and for a plain matrix."""
        if self._checkpoint.stem(name) is None:
            return None
        parts = [part.kept() for part in self._parts(name, (None,) if outputs is None else outputs, inputs)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        whole = stack(found)
        for tensor in (whole.scales, whole.minima):
            if tensor is not None and not bool(tensor.isfinite().all()):
                raise self._not_finite(name)
        return whole.to(self._device)

    def _parts(self, name: str, outputs: Sequence[range | None], inputs: range | None) -> list[StoredWeight]:
        """The given outputs of a matrix in few bits, one span after the other."""
        checkpoint, stem = self._checkpoint, self._checkpoint.stem(name)
        assert checkpoint.layout is not None and stem is not None, name
        all_outputs, all_inputs = map(range, checkpoint.matrix_shape(name))
        spans = [
            Span(
                outputs=all_outputs if span is None else span,
                inputs=all_inputs if inputs is None else inputs,
                num_inputs=len(all_inputs),
            )
            for span in outputs
        ]
        return [
            read_part(checkpoint.layout, stem, span, self._files.part, checkpoint.entries) for span in spans
        ]

    def _checked(
        self, name: str, parts: list[torch.Tensor], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor = whole.to(dtype or self._dtype).contiguous()
        self._check(name, tensor)
        return tensor.to(self._device)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        # The sum is quick and finite for any finite weights of sane size; the exact tests follow only if not.
        # It adds in float32 by itself; asked to, torch would make a copy of all of it first.
        total = float(tensor.sum())
        if not math.isfinite(total) and not bool(tensor.isfinite().all()):
            raise self._not_finite(name)
        if total == 0 and tensor.ndim > 1 and tensor.numel() > 0 and not bool(tensor.any()):
            _log.warning("tensor %s is all zero", name)

    def _not_finite(self, name: str) -> CheckpointError:
        stored = self._checkpoint.tensors.get(name)
        place = self._checkpoint.folder if stored is None else stored.file
        return CheckpointError(f"{place}: tensor {name} holds NaN or infinite values")


def _room(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, columns), content unspecified. Large ones in memory that goes back to the system as a whole: of
    the heap, a matrix of every layer would stay behind, held by small things that came after it."""
    num_bytes = rows * columns * dtype.itemsize
    if num_bytes < _LARGE_BYTES:
        return torch.empty((rows, columns), dtype=dtype)
    return huge_bytes(num_bytes).view(dtype).view(rows, columns)
