"""A decoder over a paged pool without an engine: scattered blocks, any chunking, several sequences a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from workers.kernels import CacheForm, PagedCache, pack_step
from workers.model.decoder import Decoder


@dataclass
class PagedSequence:
    """Tokens of one sequence, how many of them are in the pool, and its blocks."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)  # of every computed row, on rank 0


class PagedModel:
    """Runs steps of a decoder. Blocks are handed out in a shuffled order, so that none are neighbours."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self._block_size = block_size
        form = CacheForm(
            num_kv_heads=decoder.num_kv_heads,
            num_layers=spec.num_layers,
            block_size=block_size,
            head_dim=spec.head_dim,
            dtype=dtype,
        )
        self._kv = PagedCache.zeros(num_blocks, form)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()

    def start(self, prompt: Sequence[int], *, room: int = 64) -> PagedSequence:
        """A sequence with blocks for its prompt and `room` more tokens."""
        count = -(-(len(prompt) + room) // self._block_size)
        return PagedSequence(list(prompt), [self._free.pop() for _ in range(count)])

    def release(self, sequence: PagedSequence) -> None:
        """Gives the blocks back; the next sequence finds old keys and values in them."""
        self._free.extend(sequence.blocks)

    def step(self, work: Sequence[tuple[PagedSequence, int]], *, want: str = "all") -> None:
        """Computes the next `count` tokens of every sequence; keeps logits of all rows, the last, or none."""
        spec = self.decoder.spec
        turns_by_length = not spec.is_prefix_reusable(spec.max_model_len)
        ends = [sequence.num_computed + count for sequence, count in work]
        lengths = [max(end, len(sequence.token_ids)) for end, (sequence, _) in zip(ends, work, strict=True)]
        lens, starts, counts = [], [], []
        tokens: list[int] = []
        blocks: list[int] = []
        rows: list[int] = []
        for sequence, count in work:
            start, first_row = sequence.num_computed, len(tokens)
            used = sequence.blocks[: -(-(start + count) // self._block_size)]
            lens.append(count)
            starts.append(start)
            counts.append(len(used))
            tokens += sequence.token_ids[start : start + count]
            blocks += used
            all_rows = range(first_row, len(tokens))
            rows += {"all": all_rows, "last": all_rows[-1:], "none": range(0)}[want]
        message = pack_step(
            lens=lens,
            starts=starts,
            block_counts=counts,
            token_ids=tokens,
            blocks=blocks,
            logit_rows=rows,
            zero_blocks=(),
            lengths=lengths if turns_by_length and any(map(int.__gt__, lengths, ends)) else (),
        )
        drawn = self.decoder.forward(message, self._kv)
        taken = 0
        for sequence, count in work:
            sequence.num_computed += count
            kept = {"all": count, "last": 1, "none": 0}[want]
            if drawn is not None:
                sequence.logits.extend(drawn.logits[taken : taken + kept].clone())
            taken += kept

    def read(self, sequences: Sequence[PagedSequence], chunk: int | None) -> None:
        """Computes all known tokens of the sequences together, at most `chunk` of each in a step."""
        while pending := [s for s in sequences if s.num_computed < len(s.token_ids)]:
            self.step(
                [(s, min(chunk or len(s.token_ids), len(s.token_ids) - s.num_computed)) for s in pending]
            )

    def greedy(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int | None = None
    ) -> list[list[int]]:
        """Greedy continuations of several prompts in one batch. Needs the logits: one rank, or rank 0."""
        sequences = [self.start(prompt, room=num_tokens) for prompt in prompts]
        self.read(sequences, chunk)
        for _ in range(num_tokens - 1):
            for sequence in sequences:
                sequence.token_ids.append(int(sequence.logits[-1].argmax()))
            self.step([(sequence, 1) for sequence in sequences], want="last")
        for sequence in sequences:
            sequence.token_ids.append(int(sequence.logits[-1].argmax()))
            self.release(sequence)
        return [s.token_ids[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
