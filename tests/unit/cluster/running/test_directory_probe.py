"""The child process that reads group directories, with a Ray that is a folder of a few lines."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from cluster.running.directory_probe import ProbeError, read_directories
from workers.directory.groups import GroupEntry, GroupPhase
from workers.types import GroupId, Role

# What the probe and the directory's module need of Ray. Calls are noted in a file beside it.
RAY = """
import json, os, types
from pathlib import Path
import msgspec
from workers.directory.groups import GroupEntry, GroupListing

FOLDER = Path(__file__).parent

def init(address, **options):
    if address == "10.0.0.9:6379":
        raise ConnectionError("no cluster there")
    options["token"] = os.environ.get("RAY_AUTH_MODE")
    (FOLDER / "init.json").write_text(json.dumps([address, options]))
    print("Ray says hello")
    print("Ray says hello on standard error", file=__import__("sys").stderr)
    return types.SimpleNamespace(address_info={"session_dir": "/tmp/ray/session_1"})

def get_actor(name, namespace):
    if (name, namespace) != ("group-directory:tandem", "tandem"):
        raise ValueError(name)
    entries = msgspec.msgpack.decode((FOLDER / "entries").read_bytes(), type=tuple[GroupEntry, ...])
    listing = GroupListing(directory_id="d", version=1, entries=entries)
    method = types.SimpleNamespace(remote=lambda known, wait_s: listing)
    return types.SimpleNamespace(listing=method)

def get(value, timeout):
    return value

def shutdown():
    pass
"""
ENTRY = GroupEntry(
    group_id=GroupId("unified-1"),
    replica_id="r1",
    pool="unified",
    role=Role.UNIFIED,
    epoch=2,
    phase=GroupPhase.READY,
    address=("127.0.0.1", 5),
    rank_pids=(1, 2),
)


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake Ray that child processes import first."""
    folder = tmp_path / "path" / "ray"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(RAY)
    (folder / "actor.py").write_text("class ActorHandle:\n    pass\n")
    (folder / "entries").write_bytes(msgspec.msgpack.encode([ENTRY]))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_entries_come_and_absent_directories_are_empty(ray: Path) -> None:
    listings = read_directories("127.0.0.1:6380", ["other", "tandem"])
    assert {name: listing.entries for name, listing in listings.items()} == {"tandem": (ENTRY,)}
    address, options = json.loads((ray / "init.json").read_text())
    assert (address, options["_node_ip_address"], options["token"]) == ("127.0.0.1:6380", "127.0.0.1", None)
    assert options["log_to_driver"] is False


def test_a_token_of_this_user_is_offered(ray: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t")
    read_directories("", [])
    address, options = json.loads((ray / "init.json").read_text())
    assert (address, options["_node_ip_address"], options["token"]) == ("auto", None, "token")


def test_a_cluster_that_cannot_be_asked_is_named_with_its_reason(ray: Path) -> None:
    with pytest.raises(ProbeError) as caught:
        read_directories("10.0.0.9:6379", ["tandem"])
    assert str(caught.value) == "Ray at 10.0.0.9:6379 cannot be asked: ConnectionError: no cluster there"


def test_a_folder_named_like_a_package_where_the_person_stands_is_not_imported(
    ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "cluster").mkdir(parents=True)
    (tmp_path / "here" / "cluster" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path / "here")
    assert read_directories("", []) == {}


def test_another_cluster_is_not_taken_for_the_one_that_is_meant(ray: Path) -> None:
    assert "tandem" in read_directories("", ["tandem"], "session_1")
    with pytest.raises(
        ProbeError, match=r"it is session_1, and the dashboard that was asked is of session_2: say with --gcs"
    ):
        read_directories("", ["tandem"], "session_2")
