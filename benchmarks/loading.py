"""How fast and in how much memory the ranks of a group read a large sharded checkpoint.

    python -m benchmarks.loading                          # Llama-2-7B's shape, 13.5 GB, two ranks
    python -m benchmarks.loading --layers 8 --out loading.json

A checkpoint of that shape with random weights is made once, shard by shard, in ~/.cache/tandem/models
(--folder: elsewhere). Each of the runs drops the files from the page cache first. The disk's rate is one
process that reads all files from begin to end; then every rank is a process that reads and packs its own
part, all at the same time. A rank's slice is what its packed weights, embedding and norms take; its peak is
sampled 100 times a second: `anonymous` as RssAnon + RssShmem, `resident` as VmHWM, which has mapped libraries
too. What the process had before it began to load is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.report import record
from cluster.models.embedded import default_root
from workers.kernels import Quantization, kernels_for
from workers.model.checkpoint import Checkpoint
from workers.model.expected import expected_tensors
from workers.model.loader import load_weights
from workers.model.parallel import TensorParallel
from workers.model.spec import spec_from_config
from workers.quantizing.stream_writer import PlannedTensor, StreamWriter
from workers.runtime.device import usable_cores

_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LAYERS_PER_SHARD = 4  # 1.6 GB
_BLOCK = 1 << 24  # random weights that repeat through the files
_READ_BYTES = 8 << 20
_SAMPLE_S = 0.01
_TIMEOUT_S = 1800.0
_START_S = 120.0  # for a rank to import what it needs
_END_S = 30.0  # for a rank that was killed, which may be in the middle of a read


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.rank is not None:
        return _rank(options.folder, options.rank, options.ranks)
    folder = options.folder or default_root() / f"random-llama-{options.layers}-layers"
    make(folder, options.layers)
    checkpoint = Checkpoint(folder)
    rows = []
    for number in range(options.runs):
        rate = _disk_rate(checkpoint)
        ranks: list[dict[str, float]] = []
        numbers = range(options.ranks)
        for together in ([number] for number in numbers) if options.one_by_one else (list(numbers),):
            _drop(checkpoint)
            ranks += _run_ranks(folder, together, options.ranks)
        seconds = max(float(rank["seconds"]) for rank in ranks)
        row = {
            "run": number,
            "file_bytes": checkpoint.weight_bytes,
            "disk_bytes_per_s": round(rate),
            "seconds": round(seconds, 2),
            "one_by_one": options.one_by_one,
            "share_of_disk": round(checkpoint.weight_bytes / seconds / rate, 3),
            "ranks": ranks,
        }
        rows.append(row)
        sys.stdout.write(json.dumps(row) + "\n")
    if options.out is not None:
        settings = {"layers": options.layers, "ranks": options.ranks, "threads": usable_cores()}
        record(options.out, rows, {}, {}, settings)
    return 0


def make(folder: Path, num_layers: int) -> None:
    """The checkpoint, when it is absent: complete or not there."""
    if folder.is_dir():
        return
    temporary = folder.parent / f".{folder.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config = {**_CONFIG, "num_hidden_layers": num_layers}
    (temporary / "config.json").write_text(json.dumps(config, indent=2))
    shards: dict[int, list[PlannedTensor]] = {}
    for name, shape in expected_tensors(spec_from_config(config)).items():
        layer = int(name.split(".")[2]) if ".layers." in name else (num_layers if "head" in name else 0)
        tensor = PlannedTensor(name=name, dtype="BF16", shape=shape)
        shards.setdefault(layer // _LAYERS_PER_SHARD, []).append(tensor)
    block = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) / 64).bfloat16()
    weight_map = {}
    for number, shard in sorted(shards.items()):
        file = temporary / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        with StreamWriter(file, shard) as writer:
            for tensor in shard:
                for start in range(0, tensor.num_bytes // 2, _BLOCK):
                    writer.append(tensor.name, block[: tensor.num_bytes // 2 - start])
                weight_map[tensor.name] = file.name
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    (temporary / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    temporary.rename(folder)


def _drop(checkpoint: Checkpoint) -> None:
    """Takes the files out of the page cache."""
    for file in checkpoint.files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_rate(checkpoint: Checkpoint) -> float:
    """Bytes a second of one process that reads everything in order."""
    _drop(checkpoint)
    buffer = bytearray(_READ_BYTES)
    started = time.perf_counter()
    for file in checkpoint.files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return checkpoint.weight_bytes / (time.perf_counter() - started)


def _run_ranks(folder: Path, numbers: Sequence[int], size: int) -> list[dict[str, float]]:
    """These ranks at once, from the moment when each has imported what it needs."""
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.loading", "--folder", str(folder)),
                *("--ranks", str(size), "--rank", str(rank)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in numbers
    ]
    try:
        for number, rank in zip(numbers, ranks, strict=True):
            assert rank.stdout is not None
            says, _, _ = select.select([rank.stdout], [], [], _START_S)
            assert says, f"rank {number} did not start within {_START_S:g} s"
            assert rank.stdout.readline() == "ready\n", f"rank {number} ended before it was ready"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        return [json.loads(rank.communicate(timeout=_TIMEOUT_S)[0]) for rank in ranks]
    finally:
        _end(ranks)


def _end(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """All are killed before one is waited for. Raises TimeoutExpired, when each has had its time."""
    for rank in ranks:
        rank.kill()
    late: subprocess.TimeoutExpired | None = None
    for rank in ranks:
        try:
            rank.wait(_END_S)
        except subprocess.TimeoutExpired as error:
            late = error
    if late is not None:
        raise late


def _rank(folder: Path, rank: int, size: int) -> int:
    """One rank: loads when told to, then says what it took."""
    torch.set_num_threads(max(1, usable_cores() // size))
    kernels = kernels_for(torch.device("cpu"), torch.bfloat16)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    before = _memory()
    peak = dict(before)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            for name, value in _memory().items():
                peak[name] = max(peak[name], value)

    sampler = threading.Thread(target=watch)
    sampler.start()
    started, worked = time.perf_counter(), time.process_time()
    parallel = TensorParallel(rank, size)
    weights = load_weights(
        Checkpoint(folder), torch.bfloat16, torch.device("cpu"), parallel, kernels, Quantization.NONE
    )
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
    done.set()
    sampler.join()
    slice_bytes = _slice_bytes(Checkpoint(folder), rank, size)
    assert weights.layers
    found = {
        "rank": rank,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "slice_bytes": slice_bytes,
        "before_anonymous": before["anonymous"],
        "peak_anonymous": peak["anonymous"],
        "peak_resident": peak["resident"],
        "anonymous_over_slice": round(peak["anonymous"] / slice_bytes, 4),
        "resident_over_slice": round(peak["resident"] / slice_bytes, 4),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def _slice_bytes(checkpoint: Checkpoint, rank: int, size: int) -> int:
    """Of the weights of a rank in bfloat16: matrices and both tables are split, norms are not."""
    spec = checkpoint.spec
    attention = (
        spec.hidden_size
        * spec.head_dim
        * (2 * len(spec.q_heads_of_rank(rank, size)) + 2 * len(spec.kv_heads_of_rank(rank, size)))
    )
    mlp = 3 * spec.hidden_size * len(spec.intermediate_of_rank(rank, size))
    tables = 2 * spec.hidden_size * len(spec.vocab_of_rank(rank, size))
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    return 2 * (spec.num_layers * (attention + mlp) + tables + norms)


def _memory() -> dict[str, int]:
    """Of this process, bytes: `resident` is the largest so far."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmHWM")}
    return {"anonymous": (kib["RssAnon"] + kib["RssShmem"]) << 10, "resident": kib["VmHWM"] << 10}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description="Loading a checkpoint.")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-by-one", action="store_true", help="ranks in turn, where memory is scarce")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures and the machine's facts")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
