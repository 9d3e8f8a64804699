"""Prints what the group directories of a cluster hold, JSON as its last line. A program of its own.

Ray reads whether a cluster wants a token from the environment while it is imported, and a driver's messages
go where they please; a child process with its own environment keeps both away from the caller.

    python -m cluster.running.directory_probe HOST:PORT SESSION APPLICATION...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from cluster.child import module_command, module_path
from cluster.running.serve_api import read_token
from workers.directory.groups import GroupListing

_TIMEOUT_S = 20.0


class ProbeError(RuntimeError):
    """The directories cannot be read; the message says why."""


def read_directories(
    gcs_address: str, applications: Sequence[str], session: str = ""
) -> dict[str, GroupListing]:
    """What the directory of each application lists; one that has no directory is left out.

    `gcs_address`: Ray's own address; empty: RAY_ADDRESS, or the cluster Ray finds on this machine. `session`:
    name of the run of Ray that is meant; empty: any. Raises ProbeError.
    """
    environment = {**os.environ, "PYTHONPATH": module_path()}
    if read_token() is not None:
        environment.setdefault("RAY_AUTH_MODE", "token")
    address = gcs_address or environment.get("RAY_ADDRESS", "auto")
    command = module_command("cluster.running.directory_probe", address, session, *applications)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"Ray at {address} did not answer in {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ProbeError(f"Ray at {address} cannot be asked: {lines[-1][:300] if lines else 'no message'}")
    try:
        # Ray may write lines of its own before.
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, GroupListing])
    except (IndexError, msgspec.MsgspecError) as error:
        raise ProbeError(f"Ray at {address} cannot be asked: the answer is not readable ({error})") from error


def main(arguments: Sequence[str]) -> int:
    """Connect as a driver, ask each directory, print."""
    import ray  # only in the child: see above

    from workers.directory.actor import NAMESPACE, directory_name

    address, session, *applications = arguments
    is_local = address.partition(":")[0] in ("127.0.0.1", "localhost")
    context: Any = ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        # On a cluster that knows this machine by its loopback address, we must go by that name too.
        _node_ip_address="127.0.0.1" if is_local else None,
    )
    found = os.path.basename(context.address_info["session_dir"])
    if session not in ("", found):
        sys.exit(
            f"it is {found}, and the dashboard that was asked is of {session}: say with --gcs-address where "
            "that is"
        )
    listings: dict[str, GroupListing] = {}
    for application in applications:
        try:
            directory: Any = ray.get_actor(directory_name(application), namespace=NAMESPACE)
        except ValueError:  # no group of this application has registered yet
            continue
        listings[application] = ray.get(directory.listing.remote(None, 0.0), timeout=_TIMEOUT_S / 2)
    ray.shutdown()
    print(msgspec.json.encode(listings).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
