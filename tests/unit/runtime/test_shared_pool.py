"""Ranks, here threads, come to see each other's pools or agree that they do not."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.runtime.meeting import WRONG_PLACES, Meeting
from workers.engine.step import GroupFailed
from workers.kernels import KernelsUnavailable, Library, LogitsPart, RankPart, load_library
from workers.kernels.memory import HUGE_PAGE_BYTES
from workers.runtime.agreement import PROBLEM, Agree, Decide
from workers.runtime.follower_link import LeaderLost
from workers.runtime.handshake import Facts, pack_facts, unpack_facts
from workers.runtime.shared_pool import PartForm, _common, _offers, share

Parts = tuple[RankPart, ...] | None
# Two KV heads on rank 0, one on the others; blocks that fill no page.
FORMS = tuple(
    PartForm(
        num_blocks=11,
        block_bytes=1000 * num_kv_heads,
        num_heads=3 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        max_tokens=40,
        vocab_size=101,
        num_logits=num_logits,
    )
    for num_kv_heads, num_logits in ((2, 7), (1, 0), (1, 0))
)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Of descriptors, and of memory once no tensor holds it."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before
    gc.collect()
    assert num_mapped() == 0


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:tandem-pool")


def no_compiler() -> Library:
    raise KernelsUnavailable("no C++ compiler found")


def no_memory() -> Library:
    library = load_library()
    library.map_shared = lambda fd, num_bytes: -errno.ENOMEM
    return library


def other_products() -> Library:
    library = load_library()
    library.has_linear = not library.has_linear
    library.can_use_tiles = False
    return library


def other_tiles() -> Library:
    library = load_library()
    library.can_use_tiles = not library.can_use_tiles
    return library


def logits_of(parts: Parts) -> LogitsPart:
    assert parts is not None and parts[0].logits is not None
    return parts[0].logits


def meet(
    size: int,
    *,
    change: Callable[[Facts], Facts] = lambda facts: facts,
    loads: dict[int, Callable[[], Library]] | None = None,
    own_forms: dict[int, tuple[PartForm, ...]] | None = None,
) -> list[Parts]:
    """loads: of ranks that load another library; own_forms: of those that believe in others than FORMS."""
    meeting = Meeting(size, change)

    def run(rank: int) -> Parts:
        forms = (own_forms or {}).get(rank, FORMS[:size])
        agree: Agree = meeting.decide if rank == 0 else lambda own, _: meeting.tell(rank, own)
        return share(rank, forms, agree, (loads or {}).get(rank, load_library))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_sees_the_parts_of_all(size: int, caplog: pytest.LogCaptureFixture) -> None:
    found = meet(size)
    assert num_mapped() == size * size
    for parts in found:
        assert parts is not None and len(parts) == size
        for part, form in zip(parts, FORMS, strict=False):
            assert part.pool.shape == (11, form.block_bytes) and part.pool.is_contiguous()
            assert part.pool.data_ptr() % HUGE_PAGE_BYTES == 0 and part.work.data_ptr() % 64 == 0
            assert (part.num_heads, part.num_kv_heads) == (form.num_heads, form.num_kv_heads)
            # QKV rows and attended rows of 40 tokens.
            assert part.work.shape == (40 * (part.num_heads * 2 + part.num_kv_heads * 2) * 16 * 2,)
            assert not part.pool.any() and not part.work.any()
        assert [part.logits is None for part in parts] == [False, True, True][:size]
        logits = logits_of(parts)
        assert logits.logits.shape == (7, 101) and logits.logits.data_ptr() % 64 == 0
        assert logits.draws.shape == (7, 5) and logits.draws.data_ptr() % 8 == 0
        assert logits.ids.shape == (7,) and logits.ids.data_ptr() % 8 == 0
        assert not any(each.any() for each in logits)
    for rank, parts in enumerate(found):
        assert parts is not None
        parts[rank].pool.fill_(rank + 1)
        parts[rank].work.fill_(rank + 11)
    for number, each in enumerate(logits_of(found[-1]), 21):
        each.fill_(number)
    for parts in found:
        assert parts is not None
        for rank, part in enumerate(parts):
            assert bool((part.pool == rank + 1).all()) and bool((part.work == rank + 11).all())
        assert all(bool((each == number).all()) for number, each in enumerate(logits_of(parts), 21))
    assert caplog.records == []


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("load", "why"), [(no_compiler, "no C++ compiler found"), (no_memory, "Cannot allocate memory")]
)
def test_one_rank_that_cannot_and_none_shares(
    rank: int, load: Callable[[], Library], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert meet(3, loads={rank: load}) == [None] * 3
    (message,) = caplog.messages
    assert message.startswith(f"the ranks do not share their attention: rank {rank}: ") and why in message


@pytest.mark.parametrize(("what", "wrong", "why"), WRONG_PLACES)
def test_memory_that_is_not_that_ranks_is_not_used(
    what: str, wrong: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change(facts: Facts) -> Facts:
        return {**facts, f"{what} 0": wrong} if "path 0" in facts else facts

    assert meet(2, change=change) == [None] * 2
    (message,) = caplog.messages
    assert message.startswith("the ranks do not share their attention: rank 1: ") and why in message


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_ranks_that_expect_other_rows_do_not_share(
    rank: int, owner: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the sizes, which are rounded up, are equal."""
    first = tuple(replace(form, max_tokens=41) for form in FORMS)
    other = tuple(replace(form, max_tokens=42) if each == owner else form for each, form in enumerate(first))
    assert [form.num_bytes for form in other] == [form.num_bytes for form in first]
    own_forms = dict.fromkeys(range(3), first) | {rank: other}
    assert meet(3, own_forms=own_forms) == [None] * 3
    assert caplog.messages == [
        f"the ranks do not share their attention: rank {rank}: max_tokens of rank {owner} is 42, and 41 for "
        "rank 0"
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("load", "name"), [(other_products, "has_linear"), (other_tiles, "can_use_tiles")])
def test_ranks_that_would_compute_by_other_units_do_not_share(
    rank: int, load: Callable[[], Library], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They divide attention into other tasks."""
    if not load_library().has_linear and load is other_tiles:
        pytest.skip("this processor has no fused step")
    assert meet(2, loads={rank: load}) == [None] * 2
    (message,) = caplog.messages
    assert message.startswith(f"the ranks do not share their attention: rank 1: {name} is ")


def test_what_a_large_group_compares_fits_into_its_frames() -> None:
    forms = (replace(FORMS[0], num_blocks=1 << 40, block_bytes=1 << 40),) * 64
    facts = {"path": "x" * 40, "label": "x" * 64, PROBLEM: "", **_common(load_library(), forms)}
    assert unpack_facts(pack_facts(facts)) == facts
    offers = _offers(dict.fromkeys(range(64), facts))
    assert unpack_facts(pack_facts(offers)) == offers and not offers[PROBLEM]


def test_memory_that_could_shrink_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    label = bytes(range(32))
    fd = os.memfd_create("open-ended", os.MFD_ALLOW_SEALING)
    os.truncate(fd, FORMS[0].num_bytes)
    os.pwrite(fd, label, FORMS[0].num_bytes - len(label))
    wrong = {"path 0": f"/proc/{os.getpid()}/fd/{fd}", "label 0": label.hex()}
    try:
        found = meet(2, change=lambda facts: {**facts, **wrong} if "path 0" in facts else facts)
    finally:
        os.close(fd)
    assert found == [None] * 2
    assert caplog.messages == [
        "the ranks do not share their attention: rank 1: the memory of rank 0 could change its size"
    ]


@pytest.mark.parametrize("error", [GroupFailed("rank 1 died"), LeaderLost("rank 0 died")])
@pytest.mark.parametrize("agreements", [0, 1])
def test_a_group_that_ends_meanwhile(error: Exception, agreements: int) -> None:
    """As `agree` tells it; the fixture sees that nothing stays."""
    meeting, done = Meeting(1), []

    def agree(own: Facts, decide: Decide) -> Facts:
        if len(done) == agreements:
            raise error
        done.append(own)
        return meeting.decide(own, decide)

    with pytest.raises(type(error), match="died"):
        share(0, FORMS[:1], agree)
    assert len(done) == agreements
    error.__traceback__ = None  # holds the frames, and these the memory
