"""Starting a cluster, as far as none is needed for it; the rest is tests/integration."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cluster.launch.errors import LaunchError
from cluster.launch.local_cluster import start_local_cluster
from cluster.launch.marked import MARK, end_marked, marked_processes


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff"])
def test_a_token_that_is_none_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(LaunchError) as caught:
        start_local_cluster()
    assert str(caught.value) == (
        f"{token} holds no token that can be read; remove it, and the next start makes another"
    )
    assert token.read_bytes() == content


def test_a_home_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").touch()  # a file: no folder can be made in it, not even by root
    token = tmp_path / "home" / ".ray" / "auth_token"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(LaunchError) as caught:
        start_local_cluster()
    assert str(caught.value) == (
        f"cannot write the token of Ray to {token}: Not a directory; make the folder writable, "
        "or set HOME or RAY_AUTH_TOKEN_PATH to another place"
    )


def test_a_full_temporary_folder_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=900_000))
    with pytest.raises(LaunchError) as caught:
        start_local_cluster()
    assert str(caught.value) == (
        f"{tmp_path} has 0.9 MB free, and Ray's sockets and logs there need 100 MB; make room, or set TMPDIR "
        "to another folder"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_at_once_leaves_a_token_for_the_next_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "home" / "token"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(FileNotFoundError):
        start_local_cluster()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [file.name for file in token.parent.iterdir()] == ["token"]
    assert (len(token.read_text()), token.stat().st_mode & 0o777) == (64, 0o600)


def test_an_interrupt_while_the_head_is_started_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[str] = []

    class Interrupted(subprocess.Popen[bytes]):
        """The process runs, and Ctrl-C comes before it can be known to whoever starts it."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if mark := options["env"].get(MARK):
                marks.append(mark)
                raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_local_cluster()
        (mark,) = marks
        assert list(marked_processes(mark)) == []
        assert list((tmp_path / "temporary").iterdir()) == []
    finally:
        for mark in marks:
            end_marked(mark, term_s=0.0, kill_s=5.0)
