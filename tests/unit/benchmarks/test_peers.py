"""Peers as child processes: a stand-in program speaks the lines, this process measures and reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.catalogue import CATALOGUE, PeerKind
from benchmarks.peers.process import PeerProcess
from benchmarks.subjects import SubjectFailed
from benchmarks.works import WEIGHT_FORMATS

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.peers.serve import serve

class Peer:
    version = "stand-in 1"
    def generate(self, prompts, new_tokens):
        print("noise on stdout")
        if new_tokens > 9:
            raise MemoryError("too many")
        return len(prompts) * new_tokens / 8
    def after_beginning(self, beginning, prompt):
        return len(prompt) - len(beginning)

def load(folder, weights, cache, threads):
    if weights != "bf16":
        raise ValueError(f"no {{weights}}")
    if threads == 99:
        sys.exit(3)
    return Peer()

serve(load)
"""
ROOT = Path(__file__).parents[3]


class StandIn(PeerKind):
    """A peer whose program is given."""

    def program(self, root: Path) -> list[str]:
        return [sys.executable, str(root / "program.py")]


KIND = StandIn(name="stand_in", module="json", labels={"bf16": "stand-in", "int8": "stand-in int8"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM.format(root=str(ROOT)))
    return tmp_path


def test_seconds_come_back_and_noise_does_not(root: Path) -> None:
    peer = PeerProcess(KIND, root, Path("/models/some"), "bf16", 2)
    try:
        assert peer.version == "stand-in 1"
        assert peer.generate([[1, 2], [3, 4]], 4) == 1.0
        assert peer.after_beginning([1, 2], [1, 2, 3, 4, 5]) == 3.0
        with pytest.raises(SubjectFailed, match=r"stand-in: MemoryError: too many \(its log: .*bf16.log\)"):
            peer.generate([[1]], 10)
        assert peer.generate([[1]], 8) == 1.0  # an error is an answer: it goes on
    finally:
        peer.close()
    peer.close()


@pytest.mark.parametrize(
    ("weights", "threads", "reason"),
    [("int8", 2, "ValueError: no int8"), ("bf16", 99, "it ended without an answer")],
)
def test_a_model_that_does_not_load(root: Path, weights: str, threads: int, reason: str) -> None:
    with pytest.raises(SubjectFailed, match=reason):
        PeerProcess(KIND, root, Path("/models/some"), weights, threads)


def test_every_peer_is_pinned_and_has_a_program(tmp_path: Path) -> None:
    for name, kind in CATALOGUE.items():
        lines = [line for line in kind.requirements.read_text().splitlines() if not line.startswith("#")]
        assert lines and all("==" in line for line in lines), name
        assert (kind.requirements.parent / f"{name}.py").is_file()
        assert set(kind.labels) <= set(WEIGHT_FORMATS)
        assert not kind.is_installed(tmp_path)
        (tmp_path / name).mkdir()
        kind.stamp(tmp_path).write_text(kind.requirements.read_text())
        assert kind.is_installed(tmp_path)
        kind.stamp(tmp_path).write_text("torch==1.0\n")  # installed from an older list
        assert not kind.is_installed(tmp_path)
