"""What the owner answers when a block is given away at the worst moment."""

from __future__ import annotations

import pytest

from tests.unit.transfer.layouts import layout
from tests.unit.transfer.ranks import group, pairs, pull, settings, source_of
from workers.kernels import BlockStream
from workers.transfer.transport import Reason


def test_a_block_given_away_before_its_end_is_summed_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its end, behind the last whole page, the sum is made after the bytes have left."""
    # As many bytes as a block of SmolLM2-135M in int8.
    of = layout(num_layers=30, block_size=16, head_dim=33, dtype="bfloat16")
    assert of.block_bytes(0) == 190_080 == 46 * 4096 + 1664
    with group(of) as [owner], group(of, using=settings(transports=("sockets",))) as [reader]:
        pool = owner.agent._pool
        sums = pool.checksums

        def give_away(
            stream: BlockStream, blocks: tuple[int, ...], offset: int, num_bytes: int
        ) -> tuple[int, ...]:
            assert owner.generations is not None
            owner.generations[3] += 1
            owner.pool[3].fill_(7)
            return sums(stream, blocks, offset, num_bytes)

        assert pull(reader.agent, source_of([owner]), pairs([(3, 2)])) is None
        monkeypatch.setattr(pool, "checksums", give_away)
        error = pull(reader.agent, source_of([owner]), pairs([(3, 2)]))
        assert error is not None and error.reason is Reason.STALE
