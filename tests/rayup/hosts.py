"""Hosts as namespaces: each has an address, process ids, a name, an sshd and files in memory of its own.

Of the machine they share the processor, the kernel and the system's files. A host finds the environment that
runs the tests as its own `~/tandem/.venv`, already installed (an overlay: nothing it writes there stays). It
looks for the project in `~/tandem`, which is empty at first: what a host runs is what was copied to it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.launch.marked import MARK
from tests.rayup.tools import Tools

NETWORK = "10.77.0"
GATEWAY = f"{NETWORK}.254"  # the machine from which everything is asked
HOME = "/mnt/home"
_START_TIMEOUT_S = 20.0

# Waits for the cable, then becomes a host. Words between @ are filled in by `_script`.
_HOST = """
set -e
read -r _
hostname @NAME@
ip link set lo up
ip address add @ADDRESS@/24 dev eth0
ip link set eth0 up
ip route add default via @GATEWAY@
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -p @HOME@/tandem/.venv @HOME@/.ssh @HOME@/.cache/tandem /mnt/etc
for over in venv cache; do mkdir -p /mnt/over/$over /mnt/work/$over; done
over() { mount -t overlay -o "lowerdir=$1,upperdir=/mnt/over/$2,workdir=/mnt/work/$2" overlay "$3"; }
over @VENV@ venv @HOME@/tandem/.venv
over @CACHE@ cache @HOME@/.cache/tandem
touch @HOME@/tandem/.venv/.installed
echo @HOME@/tandem > @HOME@/tandem/.venv/@PACKAGES@/project.pth
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd @VENV@
mount --bind @HOME@/tandem/.venv @VENV@
sed 's#^root:.*#root:x:0:0:root:@HOME@:/bin/bash#; /^sshd:/d' /etc/passwd > /mnt/etc/passwd
echo 'sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin' >> /mnt/etc/passwd
echo '127.0.0.1 localhost' > /mnt/etc/hosts
echo '@ADDRESS@ @NAME@' >> /mnt/etc/hosts
: > /mnt/etc/resolv.conf
for file in passwd hosts resolv.conf; do mount --bind /mnt/etc/$file /etc/$file; done
: > @HOME@/.bashrc
echo @PUBLIC_KEY@ > @HOME@/.ssh/authorized_keys
ssh-keygen -q -t ed25519 -N '' -f /mnt/etc/host_key
cat > /mnt/etc/sshd_config <<END
ListenAddress @ADDRESS@
HostKey /mnt/etc/host_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
MaxStartups 50
SetEnv @ENVIRONMENT@
END
@PROGRAMS@
exec @SSHD@ -D -e -f /mnt/etc/sshd_config
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """What all hosts have in common."""

    tools: Tools
    cache: Path  # models and kernels of the machine's user
    public_key: str


class Host:
    """One host; made by `start`, gone after `kill`."""

    def __init__(self, number: int) -> None:
        self.name = f"host-{number}"
        self.address = f"{NETWORK}.{number}"
        self._link = f"rayup{number}"
        self._process: subprocess.Popen[str] | None = None
        self._init = 0  # its first process, seen from outside
        self._namespace = ""

    def start(self, parts: HostParts, log: Path) -> None:
        """Returns when its sshd answers."""
        apart = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*apart, "--mount-proc", "sh", "-c", _script(self, parts)],
                stdin=subprocess.PIPE, stdout=output, stderr=output, text=True,
            )  # fmt: skip
        self._init = _only_child(self._process.pid)
        self._namespace = os.readlink(f"/proc/{self._init}/ns/pid")
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(self._init))
        run("ip", "link", "set", self._link, "master", "rayup", "up")
        assert self._process.stdin is not None
        self._process.stdin.write("plugged in\n")
        self._process.stdin.close()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while "Server listening" not in log.read_text():
            assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self, title: str = "") -> list[tuple[int, str]]:
        """Ids (from outside) and command lines of all but sshd and what it runs right now for ssh."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self._init:
                continue
            try:
                if os.readlink(entry / "ns" / "pid") != self._namespace:
                    continue
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except OSError:  # ended meanwhile
                continue
            if command and not command.startswith("sshd") and title in command:
                found.append((int(entry.name), command))
        return sorted(found)

    def write(self, name: str, text: str) -> None:
        """A file in the home there."""
        Path(f"/proc/{self._init}/root{HOME}/{name}").write_text(text)

    def read_logs(self, pattern: str) -> str:
        """Ray's log files there whose names match."""
        folder = Path(f"/proc/{self._init}/root/tmp/ray")
        sessions = sorted(folder.glob("session_2*"))
        files = sorted(sessions[-1].glob(f"logs/{pattern}")) if sessions else []
        return "\n".join(file.read_text(errors="replace") for file in files)

    def kill(self) -> None:
        """As when the power fails: first the cable is dead, so nobody hears a word, then all processes."""
        if self.is_alive:
            assert self._process is not None
            run("ip", "link", "set", self._link, "down")
            os.kill(self._init, signal.SIGKILL)
            self._process.wait(10)


def start_network() -> None:
    """The switch that all cables end in, and this side's address there."""
    run("ip", "link", "add", "rayup", "type", "bridge")
    run("ip", "address", "add", f"{GATEWAY}/24", "dev", "rayup")
    run("ip", "link", "set", "rayup", "up")


def run(*command: str, timeout_s: float = 20.0) -> str:
    """Output of a command that must work."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr.strip()}"
    return done.stdout


def _script(host: Host, parts: HostParts) -> str:
    programs = parts.tools.programs
    words = {
        "PUBLIC_KEY": shlex.quote(parts.public_key),
        "PROGRAMS": f"mount --bind {shlex.quote(str(programs))} /usr/local/sbin"
        if programs is not None
        else "",
        "SSHD": shlex.quote(str(parts.tools.sshd)),
        "ENVIRONMENT": f"{MARK}={os.environ.get(MARK, '')}",
        "ADDRESS": host.address,
        "GATEWAY": GATEWAY,
        "NAME": host.name,
        "VENV": shlex.quote(sys.prefix),
        "CACHE": shlex.quote(str(parts.cache)),
        "PACKAGES": sysconfig.get_path("purelib", vars={"base": "."}).removeprefix("./"),
        "HOME": HOME,
    }
    return re.sub("@([A-Z_]+)@", lambda found: words[found[1]], _HOST)


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline, "unshare started nothing"
        time.sleep(0.02)
    return int(found[0])
