"""The dashboard of a cluster that was started is told from another's at the same address."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.launch.dashboard import RayNotUp, wait_for_dashboard
from cluster.launch.errors import LaunchError
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.fakes import FakeServer


@pytest.fixture
def head(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A head process that lives, and its log."""
    (tmp_path / "log").write_text("\x1b[36mRay starts\x1b[39m\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def wait(api: ServeApi, head: subprocess.Popen[bytes], folder: Path, timeout_s: float = 5.0) -> None:
    wait_for_dashboard(api, head, folder=folder, log=folder / "log", timeout_s=timeout_s)


def test_only_a_dashboard_whose_session_is_in_the_folder_of_the_cluster_is_its_own(
    tmp_path: Path, head: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "session_ours").mkdir()
    with FakeServer().running() as server:
        api = ServeApi(server.url)
        server.session = "session_ours"
        wait(api, head, tmp_path)
        for other in ("session_another", "", "..", "log"):
            server.session = other
            with pytest.raises(RayNotUp) as caught:
                wait(api, head, tmp_path)
            assert str(caught.value) == (
                f"another Ray cluster has taken the port of the dashboard: {server.url} is of {other!r}"
            )
        assert server.puts == []


def test_one_that_never_answers_and_a_head_that_ends_are_told_with_the_log(
    tmp_path: Path, head: subprocess.Popen[bytes]
) -> None:
    with FakeServer().running() as server:
        server.answers_dashboard = False
        api = ServeApi(server.url)
        with pytest.raises(LaunchError) as caught:
            wait(api, head, tmp_path, timeout_s=0.0)
        assert str(caught.value) == "Ray's dashboard did not answer in 0 s:\nRay starts"
        head.kill()
        head.wait(timeout=10)
        with pytest.raises(RayNotUp) as ended:
            wait(api, head, tmp_path)
        assert str(ended.value) == "Ray ended at once (code -9):\nRay starts"
