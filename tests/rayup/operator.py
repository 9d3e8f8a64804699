"""The person who brings the cluster up: a home with keys, the shipped file filled in, and `ray` commands."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.rayup.hosts import Host, run
from tests.rayup.tools import Tools

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "cluster" / "ray" / "on-premise.yaml"


class Operator:
    """Works from a folder that holds the home and the filled-in cluster file."""

    def __init__(self, folder: Path, tools: Tools) -> None:
        self._home = folder / "home"
        self._file = folder / "on-premise.yaml"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "HOME": str(self._home),
            "PATH": os.pathsep.join([str(tools.programs or "/usr/sbin"), os.environ.get("PATH", "")]),
            "TERM": "dumb",
        }
        (self._home / ".ssh").mkdir(parents=True)
        key = self._home / ".ssh" / "id_ed25519"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        self.public_key = key.with_suffix(".pub").read_text().strip()
        self.ray("get-auth-token", "--generate", timeout_s=60)
        self.api_key = secrets.token_urlsafe(24)
        keys = self._home / ".config" / "tandem" / "api-keys"
        keys.parent.mkdir(parents=True)
        keys.write_text(self.api_key + "\n")
        keys.chmod(0o600)

    def fill_in(self, head: Host, workers: Sequence[Host]) -> None:
        """The shipped file with what it asks to fill in, and nothing else."""
        config = yaml.safe_load(SHIPPED.read_text())
        config["provider"]["head_ip"] = head.address
        config["provider"]["worker_ips"] = [worker.address for worker in workers]
        config["auth"]["ssh_user"] = "root"
        config["auth"]["ssh_private_key"] = str(self._home / ".ssh" / "id_ed25519")  # ssh knows no HOME
        self._file.write_text(yaml.safe_dump(config, sort_keys=False))

    def up(self, timeout_s: float) -> str:
        """`ray up`."""
        return self.ray("up", "--yes", "--no-config-cache", str(self._file), timeout_s=timeout_s)

    def down(self, timeout_s: float) -> str:
        """`ray down`."""
        return self.ray("down", "--yes", str(self._file), timeout_s=timeout_s)

    def on_head(self, command: str, timeout_s: float) -> str:
        """Output of a command there, by `ray exec`, without Ray's words around it and colours."""
        output = self.ray(
            "exec", "--no-config-cache", str(self._file), f"echo BEGIN; {command}", timeout_s=timeout_s
        )
        return output.rpartition("BEGIN")[2].strip()

    def stop_ray(self, host: Host) -> None:
        """`ray stop` on one machine, by ssh: `ray down` does it on the head alone."""
        options = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
        key = str(self._home / ".ssh" / "id_ed25519")
        command = ("ssh", "-i", key, *options, f"root@{host.address}", "tandem/.venv/bin/ray stop")
        run(*command, timeout_s=90)

    def ray(self, *arguments: str, timeout_s: float) -> str:
        """Output of a `ray` command that must work."""
        command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            said = (error.output or b"").decode(errors="replace")
            raise AssertionError(f"ray {arguments[0]}: not done in {timeout_s:g} s\n{said[-4000:]}") from None
        output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", done.stdout)
        assert done.returncode == 0, f"ray {arguments[0]}: code {done.returncode}\n{output[-4000:]}"
        return output
