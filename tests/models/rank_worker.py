"""One rank of a tensor-parallel test: `python -m tests.models.rank_worker JOB.json RANK`.

The job lists checkpoints with prompts and texts; every rank runs them in order. Rank 0 leaves the greedy ids
in `<job>.out` (JSON) and the logits of the texts in `<job>.safetensors`. A decoder that cannot be built is a
result too.
"""

from __future__ import annotations

import json
import mmap
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.models.loading import paged_model
from tests.models.paging import PagedModel
from workers.kernels import Quantization, SharedCollective, load_library, memory_bytes
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.parallel import TensorParallel


def main(job_file: Path, rank: int) -> None:
    """Runs all works of the job as one rank."""
    torch.set_num_threads(1)
    job = json.loads(job_file.read_text())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job_file}.rendezvous",
        rank=rank,
        world_size=job["size"],
        timeout=timedelta(seconds=20),
    )
    parallel = TensorParallel(rank, job["size"], shared(job["memory"], rank, job["size"]))
    results, logits = [], {}
    for number, work in enumerate(job["works"]):
        dtype = getattr(torch, work["dtype"])
        try:
            model = paged_model(
                Path(work["folder"]),
                dtype=dtype,
                parallel=parallel,
                quantization=Quantization(work["quantization"]),
                kv_dtype=getattr(torch, work["kv_dtype"] or work["dtype"]),
            )
        except (TensorParallelError, CheckpointError) as error:
            results.append({"error": str(error)})
            continue
        sequences = [model.start(text) for text in work["texts"]]
        if sequences:
            model.read(sequences, work["chunk"])
        ids = follow_or_lead(model, work["prompts"], work["num_tokens"], work["chunk"], rank)
        results.append({"ids": ids, "kv_heads": model.decoder.num_kv_heads})
        for index, sequence in enumerate(sequences):
            if rank == 0:
                logits[f"{number}.{index}"] = torch.stack(sequence.logits)
    if rank == 0:
        save_file(logits, f"{job_file}.safetensors")
        Path(f"{job_file}.out").write_text(json.dumps(results))
    dist.destroy_process_group()


def shared(memory: int | None, rank: int, size: int) -> SharedCollective | None:
    """memory: an inherited descriptor."""
    if memory is None:
        return None
    library = load_library()
    mapped = mmap.mmap(memory, memory_bytes(library, size))
    return SharedCollective(library, mapped, rank=rank, size=size, timeout_s=60)


def follow_or_lead(
    model: PagedModel, prompts: list[list[int]], num_tokens: int, chunk: int | None, rank: int
) -> list[list[int]]:
    """Greedy decoding where rank 0 alone has logits and tells the others the tokens."""
    sequences = [model.start(prompt, room=num_tokens) for prompt in prompts]
    if not sequences:
        return []
    model.read(sequences, chunk)
    for step in range(num_tokens):
        chosen = torch.zeros(len(sequences), dtype=torch.int64)
        if rank == 0:
            chosen = torch.tensor([int(sequence.logits[-1].argmax()) for sequence in sequences])
        dist.broadcast(chosen, src=0)
        for sequence, token in zip(sequences, chosen.tolist(), strict=True):
            sequence.token_ids.append(token)
        if step < num_tokens - 1:
            model.step([(sequence, 1) for sequence in sequences], want="last")
    return [s.token_ids[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
