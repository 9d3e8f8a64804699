"""One holder at a time; whoever waits is told, and gives up after a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.file_lock import file_lock


def test_a_second_holder_is_told_and_gives_up(tmp_path: Path) -> None:
    path, told = tmp_path / "lock", []
    with (
        file_lock(path, timeout_s=1.0, on_wait=lambda: told.append("first")),
        pytest.raises(TimeoutError, match=r"lock for 0\.1 s$"),
        # Another opening of the file is another holder, in this process too.
        file_lock(path, timeout_s=0.1, on_wait=lambda: told.append("second")),
    ):
        pass
    assert told == ["second"]
    with file_lock(path, timeout_s=0.1, on_wait=lambda: told.append("third")):
        assert told == ["second"]
