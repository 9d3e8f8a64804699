"""Files that are opened only when they are files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from workers.regular_file import open_regular, read_regular


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(file)
    assert read_regular(tmp_path / "link", max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, over the limit of 4"):
        read_regular(file, max_bytes=4)


@pytest.mark.timeout(10)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        descriptors = len(os.listdir("/proc/self/fd"))
        for place in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
            with pytest.raises(OSError, match="it is no regular file"):
                open_regular(place)
        for place in (tmp_path / "socket", tmp_path / "absent"):
            with pytest.raises(OSError):
                open_regular(place)
        assert len(os.listdir("/proc/self/fd")) == descriptors
