"""Reading the part of a checkpoint's weights that one rank holds.

A rank reads only its own rows or columns of a matrix, straight out of the file. Every value is checked: a
weight that is not finite would turn all answers of the group into noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.lending import check_ids

_log = logging.getLogger(__name__)


class WeightReader:
    """Reads tensors of a checkpoint as `dtype` on `device`. A context manager: files stay open inside."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}  # safetensors handles carry no types

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def vector(self, name: str, spans: Sequence[range] | None = None) -> torch.Tensor:
        """A one-dimensional tensor, or the given spans of it one after the other."""
        stored = self._slice(name)
        parts = [stored[:]] if spans is None else [stored[span.start : span.stop] for span in spans]
        return self._checked(name, parts)

    def token_ids(self, name: str) -> torch.Tensor:
        """A vector of integers that are token ids, in rising order, int64. Raises CheckpointError."""
        found: torch.Tensor = self._slice(name)[:].long()
        check_ids(self._checkpoint.tensors[name].file, found.tolist(), self._checkpoint.vocab_size)
        return found

    def rows(self, name: str, span: range | None = None) -> torch.Tensor:
        """Rows of a matrix as it lies in the file: an embedding or a head."""
        stored = self._slice(name)
        return self._checked(name, [stored[:] if span is None else stored[span.start : span.stop]])

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
        stored = self._slice(name)
        spans: Sequence[range | None] = (None,) if outputs is None else outputs
        parts = []
        for span in spans:
            out_slice = slice(None) if span is None else slice(span.start, span.stop)
            in_slice = slice(None) if inputs is None else slice(inputs.start, inputs.stop)
            part = stored[in_slice, out_slice].T if inputs_first else stored[out_slice, in_slice]
            parts.append(part)
        return self._checked(name, parts)

    def _slice(self, name: str) -> Any:
        stored = self._checkpoint.tensors[name]
        handle = self._open.get(stored.file)
        if handle is None:
            handle = self._stack.enter_context(safe_open(str(stored.file), framework="pt", device="cpu"))
            self._open[stored.file] = handle
        return handle.get_slice(stored.entry.name)

    def _checked(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor = whole.to(dtype=self._dtype, device=self._device).contiguous()
        # The sum is quick and finite for any finite weights of sane size; the exact test follows only if not.
        if not math.isfinite(float(tensor.sum(dtype=torch.float32))) and not bool(tensor.isfinite().all()):
            file = self._checkpoint.tensors[name].file
            raise CheckpointError(f"{file}: tensor {name} holds NaN or infinite values")
        if tensor.ndim > 1 and tensor.numel() > 0 and not bool(tensor.any()):
            _log.warning("tensor %s is all zero", name)
        return tensor
