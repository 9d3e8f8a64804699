"""Shared memory: where it lies, that all who map it see one memory, and that it is gone with its tensors."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.kernels.builds import build
from workers.kernels import shared_bytes
from workers.kernels.memory import HUGE_PAGE_BYTES
from workers.transfer.cross_memory import allow_readers

NUM_BYTES = 2 * HUGE_PAGE_BYTES


@contextmanager
def whole_file() -> Iterator[int]:
    fd = os.memfd_create("tandem-test")
    try:
        os.posix_fallocate(fd, 0, NUM_BYTES)
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def fd() -> Iterator[int]:
    with whole_file() as fd:
        yield fd


def mappings(address: int) -> list[str]:
    """What /proc says of those that begin there."""
    text = Path("/proc/self/smaps").read_text()
    return re.findall(rf"^0*{address:x}-.*\n(?:[A-Z].*\n)*", text, re.MULTILINE)


def address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_all_who_map_it_see_one_memory(fd: int) -> None:
    one, other = (shared_bytes(build("native"), fd, NUM_BYTES) for _ in range(2))
    assert one.data_ptr() != other.data_ptr()
    for memory in (one, other):
        assert memory.shape == (NUM_BYTES,) and memory.data_ptr() % HUGE_PAGE_BYTES == 0
        assert not memory.any()
    one[0], other[-1] = 3, 4
    assert other[0] == 3 and one[-1] == 4
    assert os.pread(fd, 1, 0) == b"\3" and os.pread(fd, 1, NUM_BYTES - 1) == b"\4"


def test_other_processes_can_copy_from_it(fd: int) -> None:
    """As other groups read blocks of a pool (`workers.transfer.cross_memory`)."""
    memory = shared_bytes(build("native"), fd, NUM_BYTES)
    memory[HUGE_PAGE_BYTES - 1 :] = 9  # over the end of a page
    program = (
        "import ctypes, sys\n"
        "pid, address = map(int, sys.argv[1:])\n"
        "there, copy = (ctypes.c_ulong * 2)(address, 3), ctypes.create_string_buffer(3)\n"
        "here = (ctypes.c_ulong * 2)(ctypes.addressof(copy), 3)\n"
        "print(ctypes.CDLL(None).process_vm_readv(pid, here, 1, there, 1, 0), copy.raw)"
    )
    place = str(memory.data_ptr() + HUGE_PAGE_BYTES - 2)
    allow_readers()
    done = subprocess.run(
        [sys.executable, "-c", program, str(os.getpid()), place],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "3 b'\\x00\\t\\t'\n"


def has_huge_pages() -> bool:
    """Of shared memory, when asked."""
    library = build("native")
    with whole_file() as fd:
        memory = shared_bytes(library, fd, NUM_BYTES)
        return bool(library.collapse_shared(memory.data_ptr(), NUM_BYTES) == 0)


def test_it_lies_in_huge_pages_where_the_system_has_them(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    if not has_huge_pages():
        pytest.skip("this system collapses no shared memory")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        memory = shared_bytes(build("native"), fd, NUM_BYTES)
    (found,) = mappings(memory.data_ptr())
    assert f"ShmemPmdMapped: {NUM_BYTES >> 10:8} kB" in found
    assert caplog.messages == []


def test_why_it_stays_in_small_pages_is_said(
    fd: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build("native")
    monkeypatch.setattr(library, "collapse_shared", lambda address, num_bytes: errno.EINVAL)
    with caplog.at_level(logging.INFO):
        assert not shared_bytes(library, fd, NUM_BYTES).any()
    assert caplog.messages == [
        "4194304 bytes of shared memory stay in small pages, which are slower: Invalid argument"
    ]


def test_holes_are_zeros_and_become_part_of_a_huge_page() -> None:
    fd = os.memfd_create("tandem-test")
    try:
        os.truncate(fd, NUM_BYTES)
        os.pwrite(fd, b"\7", 5)
        memory = shared_bytes(build("native"), fd, NUM_BYTES)
    finally:
        os.close(fd)
    assert memory[5] == 7 and int(memory.sum()) == 7


def test_it_is_unmapped_with_the_last_tensor_over_it(fd: int) -> None:
    memory = shared_bytes(build("native"), fd, NUM_BYTES)
    address, piece = memory.data_ptr(), memory[7:9].view(2, 1)
    del memory
    gc.collect()
    (found,) = mappings(address)
    assert "tandem-test" in found
    piece.fill_(1)
    del piece
    gc.collect()
    assert mappings(address) == []


def test_nothing_is_left_mapped_where_the_file_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "read_only"
    path.write_bytes(b"x")
    library, message = build("native"), r"cannot map 4194304 bytes of shared memory: Permission"
    fd = os.open(path, os.O_RDONLY)
    try:
        before = address_space()
        for _ in range(20):
            with pytest.raises(PermissionError, match=message):
                shared_bytes(library, fd, NUM_BYTES)
    finally:
        os.close(fd)
    assert address_space() - before < 10 * NUM_BYTES
