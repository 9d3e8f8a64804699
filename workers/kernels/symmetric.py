"""Sums over the GPUs of one machine through memory that all of them see: torch's symmetric memory.

An element is added up in the order of the ranks, in the dtype of the message, whichever way the message goes.
So its bits depend neither on the length of the message nor on its place in it, and the way may go by length:

    one shot    every rank reads the parts of all and adds them up: one exchange of signals before, one after
    two shots   every rank adds up its share of the elements and writes the sums to all: less is read twice
    in pieces   what is longer than the buffer, in two shots each

NCCL's order goes by length and place. Of two ranks there is only one order, so longer messages go to NCCL
there; of more all go this way. NVIDIA's sums in the switch (multimem) are not used: their order is not told.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch

_DTYPES: Final = (torch.bfloat16, torch.float32)
_ALIGNMENT: Final = 16  # bytes that a thread reads at once
# (up to so many ranks, longest message in one shot, bytes): every rank reads as much from each other one. As
# in vLLM's own all-reduce; not measured here. Of two ranks both ways move as much.
_ONE_SHOT: Final = ((2, 1 << 62), (4, 512 << 10), (1 << 16, 256 << 10))


class PeerMemory(Protocol):
    """A buffer on the GPU of this rank that its peers read and write. All ranks make the same calls in the
    same order, in one stream each; sums do not wait on the host, and a CUDA graph can hold them."""

    @property
    def buffer(self) -> torch.Tensor:
        """(num_bytes,) uint8, a multiple of 16."""
        ...

    def meet(self) -> None:
        """Maps the memory of all ranks, before the first sum. Raises RuntimeError."""
        ...

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """The sum of `part`, a view from the start of the buffer, over all ranks; out: another memory. Both
        of one shape, aligned to 16 bytes."""
        ...

    def two_shots(self, part: torch.Tensor) -> None:
        """The same in place."""
        ...

    def release(self) -> None:
        """Lets sums end that wait for a rank that is gone, now and for a while: they give nonsense. From any
        thread."""
        ...


class SymmetricCollective:
    """This rank's end. The buffer of a sum is free for the next one when the sum has been made."""

    def __init__(self, memory: PeerMemory, size: int) -> None:
        """size: number of ranks."""
        self._memory = memory
        self._is_pair = size == 2
        self._max_one_shot_bytes = next(longest for most, longest in _ONE_SHOT if size <= most)
        self._buffers = {dtype: memory.buffer.view(dtype) for dtype in _DTYPES}

    def is_for(self, x: torch.Tensor) -> bool:
        """Whether messages of this dtype and length come here: the same on all ranks."""
        return x.dtype in _DTYPES and (not self._is_pair or x.nbytes <= self._memory.buffer.nbytes)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over all ranks, in place; x is contiguous, float32 or bfloat16."""
        assert x.is_contiguous(), x.stride()
        if x.numel() == 0:
            return
        buffer = self._buffers[x.dtype]
        for piece in torch.split(x.view(-1), len(buffer)):
            self._add_up(piece, buffer)

    def abort(self) -> None:
        """Ends what this rank waits for. Only once the group has failed: nothing raises. Takes a while."""
        self._memory.release()

    def _add_up(self, piece: torch.Tensor, buffer: torch.Tensor) -> None:
        """The choice must be that of all ranks: by length alone, not by where the piece lies."""
        length, unit = len(piece), _ALIGNMENT // piece.itemsize
        part = buffer[: -(-length // unit) * unit]  # what is behind the piece is summed too, for nobody
        part[:length].copy_(piece)
        if piece.nbytes > self._max_one_shot_bytes:
            self._memory.two_shots(part)
            piece.copy_(part[:length])
        elif length == len(part) and piece.data_ptr() % _ALIGNMENT == 0:
            self._memory.one_shot(part, piece)
        else:
            out = torch.empty_like(part)
            self._memory.one_shot(part, out)
            piece.copy_(out[:length])
