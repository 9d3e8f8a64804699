"""The API key that commands send to a service that wants one: the first of a file of keys. Never an argument,
which would show in the list of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.cli.services import DEFAULT_URL, Services
from cluster.cli.terminal import CommandFailed
from router.api.auth import read_api_keys


class Service(NamedTuple):
    """A service that answers requests."""

    url: str
    headers: Mapping[str, str]  # with an API key, where one is known


def service_at(services: Services, url: str | None, keys_file: str | None) -> Service:
    """The service asked for by `--url` and `--api-keys-file`: else the running `tandem serve` with its own
    file of keys, else the default address. Raises CommandFailed."""
    noted = services.note.all()
    running = next((cluster for cluster in noted if url in (None, cluster.api_url)), None)
    if keys_file is None and running is not None:
        keys_file = running.api_keys_file
    url = url or (running.api_url if running is not None else DEFAULT_URL)
    return Service(url.rstrip("/"), key_headers(keys_file))


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
