"""All guesses of heads on hidden states in one call of C++: cpu/guess.h."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_long, c_void_p
from itertools import chain

import torch

from workers.kernels.interface import (
    GUESS_BRANCHES,
    GuessedTokens,
    GuessHead,
    GuessModel,
    GuessTask,
    PackedLinear,
)
from workers.kernels.library import Library
from workers.kernels.packed import NativeLinear, PackedWeights
from workers.kernels.step_message import MAX_LOGIT_ROWS


class NativeHead(ctypes.Structure):
    """GuessHead in cpu/guess.h."""

    _fields_ = [("state", PackedWeights), ("tokens", c_void_p), ("out", PackedWeights)]


class NativeHeads(ctypes.Structure):
    """GuessHeads in cpu/guess.h."""

    _fields_ = [
        *[(name, c_long) for name in ("hidden", "inner", "num_heads", "vocab_size")],
        ("heads", ctypes.POINTER(NativeHead)),
        ("vocabulary", PackedWeights),
        ("places", c_void_p),
    ]


class GuessInput(ctypes.Structure):
    """As in cpu/guess.h."""

    _fields_ = [
        ("hidden", c_void_p),
        ("tasks", c_void_p),
        ("num_tasks", c_long),
        ("least", c_double),
        *[(name, c_void_p) for name in ("levels", "found", "scores")],
    ]


class NativeGuesses:
    """Implements FusedGuesses. One call at a time: it owns the buffers between the products."""

    def __init__(self, library: Library, model: GuessModel) -> None:
        """Only for models that `can_fuse_guesses` accepts."""
        self._library = library
        self._model = model  # keeps the tensors alive whose addresses are below
        ids = torch.tensor(model.token_ids)
        self._places = torch.full((model.vocab_size,), len(ids), dtype=torch.int32)
        self._places[ids] = torch.arange(len(ids), dtype=torch.int32)
        self._heads = (NativeHead * len(model.heads))(*map(_head, model.heads))
        vocabulary, first = _native(model.vocabulary), _native(model.heads[0].state)
        self._shape = NativeHeads(
            hidden=first.in_features,
            inner=first.out_features,
            num_heads=len(model.heads),
            vocab_size=model.vocab_size,
            heads=self._heads,
            vocabulary=vocabulary.weights(),
            places=self._places.data_ptr(),
        )
        self._scratch: int = library.guess_scratch()
        # Not at exit: a thread that ends with the process may still be inside a call.
        weakref.finalize(self, library.free_guess_scratch, self._scratch).atexit = False

    def __call__(
        self, hidden: torch.Tensor, tasks: Sequence[GuessTask], least: float
    ) -> list[list[GuessedTokens] | None]:
        assert hidden.dtype == torch.bfloat16 and hidden.is_contiguous(), (hidden.dtype, hidden.stride())
        assert hidden.shape[1] == self._shape.hidden, hidden.shape
        assert all(0 <= task.row < len(hidden) for task in tasks), (tasks, len(hidden))
        found: list[list[GuessedTokens] | None] = []
        for first in range(0, len(tasks), MAX_LOGIT_ROWS):
            found += self._guess(hidden, tasks[first : first + MAX_LOGIT_ROWS], least)
        return found

    def _guess(
        self, hidden: torch.Tensor, tasks: Sequence[GuessTask], least: float
    ) -> list[list[GuessedTokens] | None]:
        of_task = len(self._heads) * GUESS_BRANCHES
        rows, levels = array("q", chain.from_iterable(tasks)), array("i", bytes(4 * len(tasks)))
        places = array("i", bytes(4 * len(tasks) * of_task))
        scores = array("f", bytes(4 * len(tasks) * of_task))
        inputs = GuessInput(
            hidden=hidden.data_ptr(),
            tasks=rows.buffer_info()[0],
            num_tasks=len(tasks),
            least=least,
            levels=levels.buffer_info()[0],
            found=places.buffer_info()[0],
            scores=scores.buffer_info()[0],
        )
        is_done = self._library.guess(
            ctypes.addressof(self._shape),
            ctypes.addressof(inputs),
            self._scratch,
            torch.get_num_threads(),
        )
        if not is_done:
            raise ValueError(
                f"guesses after a token outside of 0 .. {self._model.vocab_size - 1}: "
                f"{[task.token_id for task in tasks]}"
            )
        ids = self._model.token_ids

        def tokens(at: int) -> GuessedTokens:
            pairs = zip(places[at : at + GUESS_BRANCHES], scores[at : at + GUESS_BRANCHES], strict=True)
            return [(ids[place], score) for place, score in pairs if place >= 0]

        return [
            None
            if count < 0
            else [tokens(number * of_task + level * GUESS_BRANCHES) for level in range(count)]
            for number, count in enumerate(levels)
        ]


def can_fuse_guesses(library: Library, model: GuessModel, dtype: torch.dtype) -> bool:
    """Whether every part of the heads is in the form that C++ knows."""
    if not library.has_linear or dtype != torch.bfloat16 or not model.heads:
        return False
    linears = [model.vocabulary, *(each for head in model.heads for each in (head.state, head.out))]
    return all(isinstance(each, NativeLinear) and each.out_dtype == torch.float32 for each in linears)


def _head(head: GuessHead) -> NativeHead:
    assert head.tokens.dtype == torch.bfloat16 and head.tokens.is_contiguous(), head.tokens.dtype
    return NativeHead(_native(head.state).weights(), head.tokens.data_ptr(), _native(head.out).weights())


def _native(linear: PackedLinear) -> NativeLinear:
    assert isinstance(linear, NativeLinear), "can_fuse_guesses() looked at every linear"
    return linear
