"""Pools that are not in host memory: tensors of the host stand in, whose bytes nobody touches directly.

What this does not show: NCCL itself, and the order of copies on a device's streams.
"""

from __future__ import annotations

import pytest
import torch

import workers.transfer.agent as agent
import workers.transfer.choice as choice
from tests.unit.transfer.layouts import layout
from tests.unit.transfer.ranks import content, group, pairs, pull, source_of
from workers.kernels import Library
from workers.transfer.link import PeerLink
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.transport import Reason, TransferFailed


class DevicePool(PoolBytes):
    """As on a device: copies in and out."""

    def __init__(self, pool: torch.Tensor, library: Library | None) -> None:
        super().__init__(pool, library)
        self._host = None

    def synchronize(self) -> None:
        """Copies of host tensors are done at once."""


@pytest.fixture(autouse=True)
def device_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "PoolBytes", DevicePool)


def test_a_process_group_is_used_between_devices() -> None:
    of = layout(tensor_parallel=2)
    with group(of) as owners, group(layout()) as [reader]:
        blocks = content(of, 8)
        for owner in owners:
            owner.fill(blocks)
        assert pull(reader.agent, source_of(owners), pairs([(1, 6), (2, 0)])) is None
        assert torch.equal(reader.pool[[6, 0]], blocks[[1, 2]])
        assert {route.transport for route in reader.agent.routes()} == {"process_group"}


def test_one_that_fails_is_followed_by_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(link: PeerLink, pool: PoolBytes, timeout_s: float) -> None:
        raise TransferFailed(Reason.TIMEOUT, "the two never met")

    monkeypatch.setattr(choice, "PairReader", broken)
    of = layout()
    with group(of) as [owner], group(of) as [reader]:
        owner.fill(content(of, 8))
        source, blocks = source_of([owner]), pairs([(1, 6), (2, 0)])
        error = pull(reader.agent, source, blocks)
        assert error is not None and error.reason is Reason.TIMEOUT
        assert pull(reader.agent, source, blocks) is None
        assert torch.equal(reader.pool[[6, 0]], owner.pool[[1, 2]])
        assert {route.transport for route in reader.agent.routes()} == {"sockets"}
