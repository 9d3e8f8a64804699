"""OpenVINO GenAI: its continuous batching pipeline with prefix caching, on the CPU.

Weights: bf16 is a float32 model computed in bfloat16; int8 and int4 are optimum-intel's weight compression
with its defaults, also computed in bfloat16; groups of int4 are of 64 weights, since the default of 128 does
not divide SmolLM2's width of 576 and is refused. Keys and values as OpenVINO's CPU plugin has them by
default.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.serve import TokenIds, after_cached, check_lengths, serve

_FORMATS = {
    "bf16": ["--weight-format", "fp32"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "64"],
}
_CACHE_GB = 2
_CONVERT_TIMEOUT_S = 600


class OpenVino:
    """One pipeline for all works."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.version = f"openvino-genai {version('openvino-genai')}"
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 128
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
        self._pipeline: Any = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> float:
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        started = time.perf_counter()
        found = self._pipeline.generate(tensors, [config] * len(prompts))
        seconds = time.perf_counter() - started
        check_lengths((result.m_generation_ids[0] for result in found), new_tokens)
        return seconds

    def after_beginning(self, beginning: TokenIds, prompt: TokenIds) -> float:
        return after_cached(self, beginning, prompt)


def load(folder: Path, weights: str, cache: Path, threads: int) -> OpenVino:
    """Converts the checkpoint once, by optimum-intel's command."""
    converted = cache / weights
    if not converted.exists():
        temporary = cache / f"{weights}.tmp"
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
        command += ["--model", str(folder), "--task", "text-generation-with-past"]
        command += [*_FORMATS[weights], str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"optimum-cli could not convert {folder}:\n{done.stderr[-2000:]}")
        temporary.rename(converted)
    return OpenVino(converted, threads)


if __name__ == "__main__":
    serve(load)
