"""Files that commands write: whole, or as they were before."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.cli.outputs import check_output, write_output
from cluster.cli.terminal import CommandFailed


@contextmanager
def disk_that_is_full_after(num_bytes: int) -> Iterator[None]:
    """As far as this process is concerned."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    for place in (file, tmp_path / "new.json"):
        with disk_that_is_full_after(4096), pytest.raises(CommandFailed, match=f"^{place}: File too large"):
            write_output(place, "x" * 100_000)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("report.json", "old")]


def test_a_link_and_the_mode_stay(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    file = tmp_path / "real" / "page.html"
    file.write_text("old")
    file.chmod(0o640)
    link = tmp_path / "page.html"
    link.symlink_to(file)
    check_output(link, force=True)
    write_output(link, "new")
    assert link.is_symlink()
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    broken = tmp_path / "broken"
    broken.symlink_to(tmp_path / "real" / "made.html")
    check_output(broken, force=False)
    write_output(broken, "made")
    assert (tmp_path / "real" / "made.html").read_text() == "made"


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_output(pipe, force=False)
    write_output(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    with pytest.raises(CommandFailed, match=r"^/dev/full: No space left on device"):
        write_output(Path("/dev/full"), "text")


def test_a_pipe_of_another_program_is_written_to() -> None:
    """As with `-o /dev/stdout | ...`: what its link names is no file."""
    reading, writing = os.pipe()
    place = Path(f"/dev/fd/{writing}")
    check_output(place, force=False)
    write_output(place, "text")
    assert os.read(reading, 10) == b"text"
    os.close(reading)
    os.close(writing)


def test_a_new_file_is_as_private_as_the_user_wants_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_output(tmp_path / "report.json", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "report.json").stat().st_mode & 0o777 == 0o600
