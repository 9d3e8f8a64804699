"""API keys: who may call, and the tenant that a key stands for."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path

from router.api.errors import ApiError
from workers.regular_file import open_regular

_MAX_FILE_BYTES = 1 << 20
_BEARER = b"bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `tenant` is empty without API keys; it salts the prefix cache, never leaves us."""

    tenant: str = ""


class ApiKeys:
    """The accepted keys, as digests. An empty set of keys means that no key is asked for."""

    def __init__(self, keys: frozenset[bytes] = frozenset()) -> None:
        self._tenant_of_digest = {
            sha256(key).digest(): blake2b(key, digest_size=8, person=b"tandem-tenant").hexdigest()
            for key in keys
        }

    @property
    def required(self) -> bool:
        """Whether calls need a key."""
        return bool(self._tenant_of_digest)

    def caller(self, authorization: bytes | None) -> Caller:
        """The caller of an `Authorization` header. Raises ApiError 401, alike for a missing and a wrong key.

        Works on bytes, so a key with any byte in it is only wrong. Every known key is compared, each in
        constant time, so the time tells nothing about them.
        """
        if not self.required:
            return Caller()
        scheme, _, rest = (authorization or b"").strip().partition(b" ")
        presented = sha256(rest.strip()).digest()
        tenant: str | None = None
        for digest, name in self._tenant_of_digest.items():
            if compare_digest(digest, presented):
                tenant = name
        if scheme.lower() != _BEARER or tenant is None:
            raise ApiError(
                401,
                "A valid API key is needed: send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return Caller(tenant)


def load_api_keys(path: str | None) -> ApiKeys:
    """Keys of a file, one a line; empty lines and lines that begin with # are skipped. None: no keys.

    A path that begins with ~/ is in the home of the user who runs this process.

    Raises ValueError for a file that cannot be read, that others may read, that holds no key, or a key with
    spaces inside.
    """
    return ApiKeys() if path is None else ApiKeys(frozenset(read_api_keys(path)))


def read_api_keys(path: str) -> list[bytes]:
    """The keys of a file in its order, at least one. Raises as `load_api_keys`."""
    try:
        with open_regular(Path(path).expanduser()) as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            content = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"API key file {path} cannot be read: {error.strerror}") from None
    except RuntimeError as error:
        raise ValueError(f"API key file {path} cannot be found: {error}") from None
    if mode & 0o007:
        raise ValueError(
            f"API key file {path} has mode {mode:o}: other users may use it; run chmod 600 {path}"
        )
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"API key file {path} is larger than {_MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in content.splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise ValueError(
            f"API key file {path} holds no key; write one key a line, or leave api_keys_file unset"
        )
    for number, line in enumerate(lines, 1):
        if line in keys and len(line.split()) != 1:
            raise ValueError(f"{path}:{number}: a key must be one word without spaces")
    return keys
