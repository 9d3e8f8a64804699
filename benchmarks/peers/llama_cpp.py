"""llama.cpp through the C functions of llama-cpp-python: one batch a step for all prompts, greedy.

Weights: bf16 as in the checkpoint; int8 is Q8_0, int4 is Q4_1, made by llama.cpp's own quantiser with its
defaults. Flash attention on, keys and values in f16 (its default). A batch holds 2048 tokens, 512 a pass (its
defaults). No work of a server is in the figures.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.serve import TokenIds, serve

_FILE_TYPES = {
    "int8": ("Q8_0", llama.LLAMA_FTYPE_MOSTLY_Q8_0),
    "int4": ("Q4_1", llama.LLAMA_FTYPE_MOSTLY_Q4_1),
}
_BATCH_TOKENS = 2048
_SPARE_TOKENS = 8


class LlamaCpp:
    """One model; contexts are made for the sizes asked for, outside of the time."""

    def __init__(self, file: Path, threads: int) -> None:
        self.version = f"llama-cpp-python {version('llama-cpp-python')}"
        self._threads = threads
        options = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(str(file).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._shape = (0, 0)  # sequences and tokens each that the context has room for

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> float:
        self._make_room(len(prompts), len(prompts[0]) + new_tokens)
        started = time.perf_counter()
        found = self._prefill(prompts, 0)
        for step in range(new_tokens - 1):
            position = len(prompts[0]) + step
            found = self._run([(token, position, row, True) for row, token in enumerate(found)])
        seconds = time.perf_counter() - started
        assert len(found) == len(prompts)
        return seconds

    def after_beginning(self, beginning: TokenIds, prompt: TokenIds) -> float:
        self._make_room(1, len(prompt) + 1)
        self._prefill([beginning], 0)
        started = time.perf_counter()
        self._prefill([prompt[len(beginning) :]], len(beginning))
        return time.perf_counter() - started

    def _make_room(self, sequences: int, tokens: int) -> None:
        """A context with empty memory."""
        if self._shape != (sequences, tokens):
            if self._context is not None:
                llama.llama_free(self._context)
            options = llama.llama_context_default_params()
            options.n_ctx = sequences * (-(-(tokens + _SPARE_TOKENS) // 256) * 256)
            options.n_seq_max = sequences
            options.n_batch = _BATCH_TOKENS
            options.n_threads = options.n_threads_batch = self._threads
            options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
            self._context = llama.llama_init_from_model(self._model, options)
            if not self._context:
                raise RuntimeError(f"llama.cpp has no room for {sequences} x {tokens} tokens")
            self._shape = (sequences, tokens)
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)

    def _prefill(self, prompts: Sequence[TokenIds], start: int) -> list[int]:
        """The token after each prompt."""
        rows = [
            (token, start + index, sequence, index == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for index, token in enumerate(prompt)
        ]
        found: list[int] = []
        for first in range(0, len(rows), _BATCH_TOKENS):
            found += self._run(rows[first : first + _BATCH_TOKENS])
        return found

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes (token, position, sequence, is it asked for); the best next token of those asked for."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = is_wanted
        if code := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode answered {code} to {len(rows)} rows")
        wanted = [index for index, row in enumerate(rows) if row[3]]
        return [int(self._logits(index).argmax()) for index in wanted]

    def _logits(self, index: int) -> Any:
        start = llama.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(ctypes.cast(start, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))


def load(folder: Path, weights: str, cache: Path, threads: int) -> LlamaCpp:
    """Writes the GGUF file once."""
    llama.llama_backend_init()
    original = cache / "bf16.gguf"
    if not original.exists():
        write_gguf(folder, temporary := original.with_suffix(".tmp"))
        temporary.rename(original)
    if weights == "bf16":
        return LlamaCpp(original, threads)
    name, file_type = _FILE_TYPES[weights]
    file = cache / f"{name}.gguf"
    if not file.exists():
        options = llama.llama_model_quantize_default_params()
        options.ftype, options.nthread = file_type, threads
        temporary = file.with_suffix(".tmp")
        if llama.llama_model_quantize(str(original).encode(), str(temporary).encode(), ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp cannot quantise {original} to {name}")
        temporary.rename(file)
    return LlamaCpp(file, threads)


if __name__ == "__main__":
    serve(load)
