"""The API key that commands send to a service that wants one: the first of a file of keys. Never an argument,
which would show in the list of processes."""

from __future__ import annotations

from cluster.cli.terminal import CommandFailed
from router.api.auth import read_api_keys


def key_headers(file: str | None) -> dict[str, str]:
    """HTTP headers with the first key of a file like `router.http.api_keys_file`; none without a file.

    Raises CommandFailed.
    """
    if not file:
        return {}
    try:
        key = read_api_keys(file)[0]
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    if not key.isascii():
        raise CommandFailed(f"{file}: the first key is not ASCII; put one first that is")
    return {"authorization": f"Bearer {key.decode('ascii')}"}
