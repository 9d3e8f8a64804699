"""How many blocks a sequence will still need: the basis of admission.

Admitting by the first chunk alone fills the pool with sequences that preempt each other as they grow. So the
whole expected length counts, prompt and output; the output's is a moving mean over the sequences that ended,
because max_tokens is usually far above what comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.search import search_of
from workers.engine.sequence import Sequence

_GUESS_WEIGHT = 4  # ended sequences that the first guess stands for: the first to end are the short ones
_WINDOW = 32  # ended sequences that the mean looks back on


class OutputLengthEstimate:
    """Expected output of a sequence, in tokens."""

    def __init__(self, *, block_size: int, first_guess: int) -> None:
        self._block_size = block_size
        self._mean = float(first_guess)
        self._weight = _GUESS_WEIGHT

    @property
    def mean(self) -> float:
        return self._mean

    def observe(self, num_output_tokens: int, *, was_cut: bool) -> None:
        """A sequence ended with this many tokens. One that was cut off at its limit says only that it would
        have been at least so long: it moves the mean up, never down."""
        length = max(float(num_output_tokens), self._mean) if was_cut else float(num_output_tokens)
        self._weight = min(self._weight + 1, _WINDOW)
        self._mean += (length - self._mean) / self._weight

    def expected_blocks(self, sequence: Sequence) -> int:
        """Blocks of the sequence at its expected end, at most those of its last allowed token. Hypotheses of
        a beam search are expected to share the prompt's and no others."""
        blocks = self._blocks_of_one(sequence)
        if sequence.num_rows == 1:
            return blocks
        own = blocks - sequence.prompt_len // self._block_size
        return blocks + (sequence.num_rows - 1) * own

    def expected_left(self, sequence: Sequence) -> int:
        """Tokens that are expected to come yet."""
        return max(0, self._expected_tokens(sequence) - sequence.num_tokens)

    def demand(self, running: Iterable[Sequence], searching: Iterable[Sequence]) -> int:
        """Blocks that these are expected to ask for until they end."""
        held = [(each, len(each.block_table)) for each in running]
        held += [(each, search_of(each).num_blocks) for each in searching]
        return sum(max(0, self.expected_blocks(each) - num_held) for each, num_held in held)

    def _blocks_of_one(self, sequence: Sequence) -> int:
        return -(-self._expected_tokens(sequence) // self._block_size)

    def _expected_tokens(self, sequence: Sequence) -> int:
        """That are computed until its end."""
        sampling = sequence.parent.request.sampling
        # The token sampled last is never computed, hence - 1; with max_tokens 0 none is sampled.
        most = max(sequence.max_num_tokens - 1, sequence.prompt_len)
        if sampling.ignore_eos and not sampling.stop_token_ids:
            return most  # goes on to max_tokens
        # One longer than the mean is expected to go on for another block.
        output = max(int(self._mean), sampling.min_tokens, len(sequence.output) + self._block_size)
        return min(most, sequence.prompt_len + output)
