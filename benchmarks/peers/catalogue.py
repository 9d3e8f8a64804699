"""Which peers there are, where their environments lie, what they can do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """One other engine."""

    name: str  # of its folder, its program and its requirements file
    module: str  # importing it proves the installation
    labels: Mapping[str, str]  # weight format -> its name in the rows
    unwanted: tuple[str, ...] = ()  # packages to remove after the installation

    @property
    def requirements(self) -> Path:
        return _HERE / f"{self.name}.txt"

    def python(self, root: Path) -> Path:
        return root / self.name / "bin" / "python"

    def program(self, root: Path) -> list[str]:
        """The command that serves it, as far as its arguments."""
        return [str(self.python(root)), "-m", f"benchmarks.peers.{self.name}"]

    def stamp(self, root: Path) -> Path:
        """Holds the requirements that were installed, when that ended well."""
        return root / self.name / "installed.txt"

    def is_installed(self, root: Path) -> bool:
        stamp = self.stamp(root)
        return stamp.exists() and stamp.read_text() == self.requirements.read_text()

    def environment(self) -> dict[str, str]:
        """For pip and for the peer: without what belongs to our own environment."""
        kept = {
            name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        flags = f"-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-include {_HERE / 'gcc12_tiles.h'}'"
        return {"CMAKE_ARGS": flags, **kept}


CATALOGUE: Mapping[str, PeerKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            PeerKind(
                name="llama_cpp",
                module="llama_cpp",
                labels={"bf16": "llama.cpp bf16", "int8": "llama.cpp Q8_0", "int4": "llama.cpp Q4_1"},
            ),
            PeerKind(
                name="openvino",
                module="openvino_genai",
                labels={"bf16": "openvino bf16", "int8": "openvino int8", "int4": "openvino int4"},
                unwanted=("torchvision",),  # does not load beside torch's CPU build
            ),
            PeerKind(
                name="vllm_cpu",
                module="vllm.entrypoints.llm",
                labels={"bf16": "vllm bf16"},
                unwanted=("torchvision", "torchaudio", "torchcodec"),
            ),
        )
    }
)


def default_root() -> Path:
    """Folder of the environments in the user's cache."""
    return Path.home() / ".cache" / "tandem" / "peers"
