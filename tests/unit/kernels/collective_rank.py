"""One rank of a test of collectives: `python -m tests.unit.kernels.collective_rank FD RANK SIZE`.

FD: the inherited shared memory. Prints one JSON line with what it found.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from hashlib import blake2b

import torch

from tests.unit.kernels.builds import build
from workers.kernels.collective import SharedCollective, memory_bytes

PATIENCE_S = 120.0  # the machine may be busy
CHUNK_BYTES = 128 << 10
# Elements of an all-reduce: none, one, odd, a whole chunk of either dtype, one more, many chunks.
SIZES = [0, 1, 7, 257, CHUNK_BYTES // 4, CHUNK_BYTES // 2, CHUNK_BYTES // 2 + 1, 300_001]
WIDTHS = [(3, 2, 2), (1, 0, 5), (40_001, 40_000, 40_000)]
NUM_ROUNDS = 10_000


def part(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings to a sum."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    return (torch.randn(n, generator=generator) * 10**rank).to(dtype)


def columns(rank: int, rows: int, width: int) -> torch.Tensor:
    """What a rank brings to a gather."""
    return (torch.arange(rows * width, dtype=torch.float32) + 1_000_000 * rank).view(rows, width)


def digest(x: torch.Tensor) -> str:
    return blake2b(x.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def sums(collective: SharedCollective, rank: int) -> dict[str, str]:
    """Digest of every sum."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n in SIZES:
            x = part(rank, n, dtype)
            collective.all_reduce(x)
            found[f"{dtype} {n}"] = digest(x)
    return found


def gathers(collective: SharedCollective, rank: int, size: int) -> list[str]:
    """Digest of what every gather gave; empty for nothing."""
    found = []
    for widths in WIDTHS:
        for rows in (0, 1, 5):
            out = collective.gather_columns(columns(rank, rows, widths[rank]), widths[:size])
            found.append("" if out is None else digest(out))
    return found


def rounds(collective: SharedCollective, rank: int, size: int) -> int:
    """Many short ones, each with its own right answer, while ranks come at different times."""
    for number in range(NUM_ROUNDS):
        if number % 2_000 == 500 * rank:
            time.sleep(0.01)
        x = torch.full((5,), float(number % 1000 + rank))
        collective.all_reduce(x)
        expected = float(size * (number % 1000) + size * (size - 1) // 2)
        assert x.tolist() == [expected] * 5, (number, x.tolist(), expected)
    return NUM_ROUNDS


def main(fd: int, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    library = build("native")
    memory = mmap.mmap(fd, memory_bytes(library, size))
    collective = SharedCollective(library, memory, rank=rank, size=size, timeout_s=PATIENCE_S)
    found = [
        sums(collective, rank),
        gathers(collective, rank, size),
        rounds(collective, rank, size),
        sums(collective, rank),
    ]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
