from __future__ import annotations

import time
from typing import NamedTuple

import pytest
import torch

import workers.transfer.process_group as process_group
from tests.unit.transfer.processes import Child, Processes, layout_of
from tests.unit.transfer.ranks import SECRET, pairs
from workers.ports import open_store
from workers.transfer.layout import Piece, reads
from workers.transfer.link import PeerLink
from workers.transfer.messages import Data, Pair, Read, Trailer, encode
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.process_group import PairGroup, PairReader
from workers.transfer.transport import Reason, TransferFailed

NUM_BLOCKS = 8
BLOCKS = pairs([(block, block) for block in range(NUM_BLOCKS)])
LAYOUT = layout_of(64)
PIECES = reads(LAYOUT, 0, LAYOUT)
TIMEOUT_S = 10.0


class Pairing(NamedTuple):
    """A reader here and its owner in another process."""

    owner: Child
    pool: PoolBytes
    reader: PairReader

    def arrived(self) -> list[int]:
        """Blocks that are whole."""
        return [block for block in range(NUM_BLOCKS) if bool((self.pool.blocks[block] == block + 1).all())]


def pairing(processes: Processes, timeout_s: float = TIMEOUT_S, block_kib: int = 64) -> Pairing:
    owner = processes.owner(NUM_BLOCKS, block_kib)
    pool = PoolBytes(torch.zeros(NUM_BLOCKS, block_kib << 10, dtype=torch.uint8))
    link = PeerLink(owner.endpoint, SECRET, timeout_s=timeout_s)
    return Pairing(owner, pool, PairReader(link, pool, timeout_s))


def failure(pair: Pairing) -> Reason:
    with pytest.raises(TransferFailed) as caught:
        pair.reader.read(BLOCKS, PIECES)
    return caught.value.reason


@pytest.mark.parametrize("after", [0, 3, 7])
def test_a_killed_owner_is_noticed_and_other_groups_go_on(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(process_group, "_BUFFER_BYTES", 0)  # one block a message
    one, other = pairing(processes), pairing(processes)
    other.reader.read(BLOCKS, PIECES)
    receive = one.reader._group.receive
    calls = iter(range(100))

    def kill_and_receive(data: torch.Tensor) -> None:
        if next(calls) == after:
            one.owner.stop()  # the bytes may be under way
            one.owner.kill()
        receive(data)

    one.reader._group.receive = kill_and_receive  # type: ignore[method-assign]
    started = time.monotonic()
    assert failure(one) is Reason.UNREACHABLE
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert one.arrived()[:after] == list(range(after))
    other.pool.blocks.zero_()
    other.reader.read(BLOCKS, PIECES)
    assert other.arrived() == list(range(NUM_BLOCKS))
    one.reader.close()
    other.reader.close()


def test_a_reader_asks_for_no_more_than_any_owner_may_send(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large its own blocks are, and so its own buffer."""
    one = pairing(processes)
    monkeypatch.setattr(process_group, "_BUFFER_BYTES", 3 * LAYOUT.block_bytes(0))
    assert len(one.reader._buffer) >= NUM_BLOCKS * LAYOUT.block_bytes(0)
    asked, send = [], one.reader._link.send

    def note(message: Read) -> None:
        asked.append(len(message.blocks))
        send(message)

    monkeypatch.setattr(one.reader._link, "send", note)
    one.reader.read(BLOCKS, PIECES)
    assert asked == [3, 3, 2] and one.arrived() == list(range(NUM_BLOCKS))
    one.reader.close()


def test_a_stopped_owner_is_noticed_by_the_timeout(processes: Processes) -> None:
    pair = pairing(processes, timeout_s=0.5)
    pair.owner.stop()
    started = time.monotonic()
    assert failure(pair) is Reason.TIMEOUT
    assert time.monotonic() - started < 5
    pair.owner.go_on()
    pair.reader.close()
    again = PairReader(PeerLink(pair.owner.endpoint, SECRET, timeout_s=TIMEOUT_S), pair.pool, TIMEOUT_S)
    again.read(BLOCKS, PIECES)
    assert pair.arrived() == list(range(NUM_BLOCKS))
    again.close()


def test_requests_that_come_with_the_wish_to_pair_are_answered(processes: Processes) -> None:
    owner = processes.owner(NUM_BLOCKS, 64)
    link = PeerLink(owner.endpoint, SECRET, timeout_s=TIMEOUT_S)
    store = open_store("127.0.0.1", timeout_s=TIMEOUT_S)
    request = encode(
        Read(number=1, blocks=(2,), generations=(0,), offset=0, num_bytes=64 << 10, has_checksums=False)
    )
    pair = encode(Pair(host="127.0.0.1", port=store.port, timeout_s=TIMEOUT_S))
    link._socket.sendall(pair + request + request[:7])  # as of a reader that need not wait for the owner
    group = PairGroup(store, 0, "127.0.0.1", torch.device("cpu"), TIMEOUT_S)
    link._socket.sendall(request[7:])
    for _ in range(2):
        arrived = torch.zeros(64 << 10, dtype=torch.uint8)
        assert link.receive() == Data(number=1)
        group.receive(arrived)
        assert bool((arrived == 3).all())
        assert link.receive() == Trailer(number=1, is_current=True, checksums=())
    link.close()
    group.abort()


def test_a_reader_that_hangs_costs_the_owner_one_thread_for_the_timeout(processes: Processes) -> None:
    pair = pairing(processes, timeout_s=0.5)
    pair.reader._link.send(
        Read(
            number=1,
            blocks=tuple(range(NUM_BLOCKS)),
            generations=(),
            offset=0,
            num_bytes=LAYOUT.block_bytes(0),
            has_checksums=False,
        )
    )
    assert pair.owner.ask("peers") == 1
    deadline = time.monotonic() + 5
    while pair.owner.ask("peers"):  # it never receives
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pair.reader.close()
    fresh = PairReader(PeerLink(pair.owner.endpoint, SECRET, timeout_s=TIMEOUT_S), pair.pool, TIMEOUT_S)
    fresh.read(BLOCKS, PIECES)
    fresh.close()


def test_a_block_given_away_is_refused_and_the_pair_goes_on(processes: Processes) -> None:
    pair = pairing(processes)
    pair.owner.ask("bump 3")
    assert failure(pair) is Reason.STALE
    pair.reader.read(BLOCKS[:3], PIECES)
    assert pair.arrived() == [0, 1, 2]
    pair.reader.close()


def test_more_than_the_buffer_holds_is_refused(processes: Processes) -> None:
    pair = pairing(processes, block_kib=128)
    piece = Piece(0, 0, 0, 128 << 10)
    with pytest.raises(TransferFailed, match="256 pieces of 131072 bytes, the buffer has 16777216"):
        pair.reader._read(pairs([(0, 0)]) * 256, piece)
    pair.reader.close()


def test_a_meeting_place_that_is_not_there_harms_nobody(processes: Processes) -> None:
    owner = processes.owner(NUM_BLOCKS, 64)
    link = PeerLink(owner.endpoint, SECRET, timeout_s=TIMEOUT_S)
    link.send(Pair(host="127.0.0.1", port=1, timeout_s=0.2))
    with pytest.raises(TransferFailed, match="closed the connection"):
        link.receive()
    assert PeerLink(owner.endpoint, SECRET, timeout_s=TIMEOUT_S).facts.num_blocks == NUM_BLOCKS
