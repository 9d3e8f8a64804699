"""Memory that is handed to another process: what its owner makes of it, and what is not taken for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.runtime import memfd

NUM_BYTES = 3 * 4096 + 5
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.fixture
def fd(no_descriptor_is_left: None) -> Iterator[int]:
    fd = memfd.create("tandem-test", NUM_BYTES)
    yield fd
    os.close(fd)


def refusal(path: str, label: bytes, num_bytes: int = NUM_BYTES) -> str:
    with pytest.raises(OSError) as caught, memfd.opened(path, label, num_bytes, 3):
        pass
    return str(caught.value)


def test_what_one_writes_the_other_reads(fd: int) -> None:
    label = memfd.seal(fd)
    with memfd.opened(memfd.path_of(fd), label, NUM_BYTES, 3) as other:
        assert other != fd
        assert not os.get_inheritable(fd) and not os.get_inheritable(other)
        os.pwrite(other, b"abc", 4095)
    assert os.pread(fd, 5, 4094) == b"\0abc\0"


def test_a_seal_takes_the_memory_and_fixes_the_size_for_good(fd: int) -> None:
    assert os.fstat(fd).st_blocks == 0
    memfd.seal(fd)
    assert os.fstat(fd).st_blocks * 512 == 4 * 4096
    for num_bytes in (NUM_BYTES - 1, NUM_BYTES + 1):
        with pytest.raises(PermissionError):
            os.truncate(fd, num_bytes)
    with pytest.raises(PermissionError):  # nor can seals be added, as one against writing
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_label_is_at_the_end_and_another_each_time(fd: int) -> None:
    label = memfd.seal(fd)
    assert len(label) == memfd.LABEL_BYTES
    assert os.pread(fd, NUM_BYTES, 0) == bytes(NUM_BYTES - memfd.LABEL_BYTES) + label
    other = memfd.create("tandem-test", NUM_BYTES)
    try:
        assert memfd.seal(other) != label
    finally:
        os.close(other)


def test_memory_with_another_label_is_refused(fd: int) -> None:
    label = memfd.seal(fd)
    wrong = label[:-1] + bytes([label[-1] ^ 1])
    assert refusal(memfd.path_of(fd), wrong) == "the memory that was found is not that of rank 3"


def test_memory_of_another_size_is_refused(fd: int) -> None:
    label = memfd.seal(fd)
    assert refusal(memfd.path_of(fd), label, NUM_BYTES - 1) == (
        f"the memory of rank 3 has {NUM_BYTES} bytes, expected are {NUM_BYTES - 1}"
    )


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_that_could_change_its_size_is_refused(fd: int, seals: int) -> None:
    label = bytes(range(memfd.LABEL_BYTES))
    os.pwrite(fd, label, NUM_BYTES - len(label))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    assert refusal(memfd.path_of(fd), label) == "the memory of rank 3 could change its size"
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    with memfd.opened(memfd.path_of(fd), label, NUM_BYTES, 3):
        pass


@pytest.mark.parametrize("path", ["/dev/zero", "pipe"])
def test_what_is_no_regular_file_is_refused(path: str) -> None:
    """Without waiting for it: a pipe has no other end that writes."""
    ends = os.pipe() if path == "pipe" else (os.open(path, os.O_RDWR),)
    try:
        message = "the memory of rank 3 has 0 bytes, expected are "
        for num_bytes in (0, NUM_BYTES):
            found = refusal(memfd.path_of(ends[0]), bytes(memfd.LABEL_BYTES), num_bytes)
            assert found == f"{message}{num_bytes}"
    finally:
        for end in ends:
            os.close(end)


def test_a_path_that_is_no_descriptor_of_a_process_is_refused(fd: int, tmp_path: Path) -> None:
    """Also where it leads to the memory itself."""
    label = memfd.seal(fd)
    link = tmp_path / "link"
    link.symlink_to(memfd.path_of(fd))
    for path in (str(link), f"/proc/self/fd/{fd}", memfd.path_of(fd) + "/", memfd.path_of(fd) + "\n", ""):
        assert refusal(path, label) == f"{path!r:.82} is no memory of a process"
    gone = memfd.path_of(1 << 20)
    assert "No such file or directory" in refusal(gone, label)
