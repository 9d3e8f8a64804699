"""A file is replaced whole, with the mode that is asked for, or left as it was."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cluster.whole_file import replace_file


def test_the_new_text_is_there_with_its_mode_and_its_ends_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "note"
    replace_file(file, "a\r\nä\n", mode=0o600)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == ("a\r\nä\n".encode(), 0o600)
    replace_file(file, "b")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"b", 0o644)
    assert list(tmp_path.iterdir()) == [file]


def test_a_text_that_cannot_be_written_leaves_the_old_one_and_nothing_beside(tmp_path: Path) -> None:
    file = tmp_path / "note"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\udcff")
    assert (file.read_text(), list(tmp_path.iterdir())) == ("old", [file])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "full").write_text("")
    with pytest.raises(OSError) as caught:
        replace_file(tmp_path / "folder", "new")
    assert caught.value.errno in (errno.EISDIR, errno.ENOTEMPTY)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "note"]
