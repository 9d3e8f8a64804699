"""The secret of an application's data plane, made once and kept by Ray's control store.

Only processes of the cluster can read it there (with token authentication on, which Tandem asks for). It
outlives directory, fronts and routers, so none of them can come back with another one.
"""

from __future__ import annotations

import secrets

from ray.experimental import internal_kv

_NAMESPACE = b"tandem"
_SECRET_BYTES = 32


def application_secret(application: str) -> bytes:
    """The secret of this application; made now when there is none yet. Blocks on the control store."""
    key = b"data-plane-secret:" + application.encode()
    # Of several processes that come first at the same time, one writes and all read the same value.
    internal_kv._internal_kv_put(
        key, secrets.token_bytes(_SECRET_BYTES), overwrite=False, namespace=_NAMESPACE
    )
    secret = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    if not isinstance(secret, bytes) or len(secret) != _SECRET_BYTES:
        raise RuntimeError(f"Ray's control store has no usable secret for application {application!r}")
    return secret
