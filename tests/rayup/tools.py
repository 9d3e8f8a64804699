"""sshd and rsync for the hosts: the machine's own, or Debian's packages unpacked beside, never installed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# With the libraries that the first two need and a small machine lacks.
_PACKAGES = ("openssh-server", "rsync", "libwrap0", "libpopt0")
_LIBRARIES = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
              "usr/lib/aarch64-linux-gnu")  # fmt: skip
_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_NEEDED = ("ip", "mount", "unshare", "setpriv", "ssh", "ssh-keygen", "make")


class ToolsMissing(RuntimeError):
    """The machine lacks something that cannot be had either; the message says what."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Where programs are; `programs` belongs on the PATH of hosts and of who brings them up."""

    sshd: Path  # absolute: sshd starts itself again by that path
    programs: Path | None  # None: all are where the system has them


def find_tools(cache: Path) -> Tools:
    """The tools; unpacked into `cache` at the first time. Raises ToolsMissing."""
    for name in _NEEDED:
        if shutil.which(name, path=_PATH) is None:
            raise ToolsMissing(f"{name} is not installed")
    sshd, rsync = (shutil.which(name, path=_PATH) for name in ("sshd", "rsync"))
    if sshd is not None and rsync is not None:
        return Tools(Path(sshd), None)
    programs = cache / "programs"
    if not programs.exists():
        _unpack(cache)
    return Tools(programs / "sshd", programs)


def _unpack(cache: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ToolsMissing("sshd and rsync are not installed, and this is no Debian to get them from")
    shutil.rmtree(cache, ignore_errors=True)
    (cache / "packages").mkdir(parents=True)
    try:
        try:
            _run(["apt-get", "download", *_PACKAGES], cache / "packages")
        except subprocess.CalledProcessError:  # the machine knows no packages yet, or only old ones
            _run(["apt-get", "update"], cache)
            _run(["apt-get", "download", *_PACKAGES], cache / "packages")
        for package in sorted((cache / "packages").glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(cache / "root")], cache)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise ToolsMissing(
            f"Debian's packages of sshd and rsync cannot be had: {said.strip()[-300:]}; "
            "run apt-get install openssh-server rsync"
        ) from error
    libraries = ":".join(str(cache / "root" / folder) for folder in _LIBRARIES)
    making = cache / "making"
    making.mkdir()
    for name, place in (("sshd", "usr/sbin/sshd"), ("rsync", "usr/bin/rsync")):
        wrapper = making / name
        wrapper.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {cache / "root" / place} "$@"\n')
        wrapper.chmod(0o755)
    making.rename(cache / "programs")  # only a finished one is found again


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=True)
