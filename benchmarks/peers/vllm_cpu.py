"""vLLM on the CPU, its offline engine with prefix caching. Weights: bf16 only."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.serve import TokenIds, after_cached, check_lengths, serve


class Vllm:
    """One engine for all works."""

    def __init__(self, folder: Path, threads: int) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB; vLLM has no argument for these three
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # reads the environment when it loads

        self.version = f"vllm-cpu {version('vllm-cpu')}"
        self._vllm: Any = vllm
        self._engine: Any = vllm.LLM(
            str(folder), dtype="bfloat16", max_model_len=4096, max_num_seqs=128, enable_prefix_caching=True
        )

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> float:
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        texts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        started = time.perf_counter()
        found = self._engine.generate(texts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        check_lengths((result.outputs[0].token_ids for result in found), new_tokens)
        return seconds

    def after_beginning(self, beginning: TokenIds, prompt: TokenIds) -> float:
        return after_cached(self, beginning, prompt)


def load(folder: Path, _weights: str, _cache: Path, threads: int) -> Vllm:
    """The checkpoint as it is."""
    return Vllm(folder, threads)


if __name__ == "__main__":
    serve(load)
