"""Compiles the C++ kernels for this machine, once.

The library lies in the user's cache folder under a key of sources, compiler and CPU flags. Ranks that start
at the same time wait for one of them to compile; the file appears by a rename when all of it is on the disk,
so nobody loads half of one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from workers.file_lock import file_lock

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # whether a product and a sum become one rounding would be up to what is around them
)
COMPILE_TIMEOUT_S = 300.0


class KernelsUnavailable(Exception):
    """The C++ kernels cannot be had on this machine; the message says why and what would help."""


def default_cache() -> Path:
    """Where compiled kernels are kept."""
    return Path.home() / ".cache" / "tandem" / "kernels"


def library(
    cache: Path, sources: Path = SOURCES, march: str = "native", defines: tuple[str, ...] = ()
) -> Path:
    """The compiled library for this machine, built now if it is not there. Raises KernelsUnavailable.

    sources: folder with kernels.cpp and what it includes. march: an instruction set by g++'s name; tests
    build what other CPUs get, and by `defines` (macros) what stands in for instructions that this one lacks.
    """
    flags = (*FLAGS, f"-march={march}", *(f"-D{name}" for name in defines))
    path = _target(cache, sources, flags)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.parent / "lock", timeout_s=COMPILE_TIMEOUT_S):
            if not path.exists():
                _compile(path, sources, flags)
    except TimeoutError as error:
        raise KernelsUnavailable(str(error)) from error
    except OSError as error:
        raise KernelsUnavailable(f"cannot write compiled kernels to {path.parent}: {error}") from error
    return path


def _compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        raise KernelsUnavailable("no C++ compiler found; install g++ for fast CPU kernels")
    return found


def _target(cache: Path, sources: Path, flags: tuple[str, ...]) -> Path:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise KernelsUnavailable(f"no C++ kernels for {sys.platform} on {platform.machine()}")
    key = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        if source.suffix in (".h", ".cpp"):
            key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    key.update(_compiler_version() + _cpu_flags() + " ".join(flags).encode())
    return cache / key.hexdigest()[:20] / "kernels.so"


def _compiler_version() -> bytes:
    command = [_compiler(), "--version"]
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"{command[0]} does not work: {error}") from error


def _cpu_flags() -> bytes:
    with open("/proc/cpuinfo", "rb") as file:
        return next((line for line in file if line.startswith(b"flags")), b"")


def _compile(path: Path, sources: Path, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [_compiler(), *flags, str(sources / "kernels.cpp"), "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise KernelsUnavailable(f"{command[0]} did not end within {COMPILE_TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            raise KernelsUnavailable(f"{command[0]} failed on the CPU kernels:\n{done.stderr[-2000:]}")
        with built.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(built, path)
