"""How Prometheus scrapes Tandem: by Ray's service discovery, or one application's plain /metrics.

Through Ray our series are named `ray_tandem_...`, which the scrape renames to the plain names. So pages
and rules know one name, whichever way it came. Take one way, not both: each tells everything, and sums would
count twice.
"""

from __future__ import annotations

from typing import Any, Final

DEFAULT_DASHBOARD: Final = "http://127.0.0.1:8265"
DEFAULT_TARGET: Final = "127.0.0.1:8000"
INTERVAL: Final = "10s"  # Ray's agents are told every five seconds

RENAMING: Final[dict[str, Any]] = {
    "source_labels": ["__name__"],
    "regex": "ray_(tandem_.+)",
    "target_label": "__name__",
    "replacement": "${1}",
}


def through_ray(
    dashboard: str = DEFAULT_DASHBOARD, *, token_file: str | None = None, rules: str | None = None
) -> dict[str, Any]:
    """All nodes of a Ray cluster, as its dashboard lists them. `token_file`: holds Ray's token, when the
    cluster wants one. `rules`: a rules file, as Prometheus finds it."""
    discovery: dict[str, Any] = {"url": f"{dashboard}/api/prometheus/sd", "refresh_interval": "15s"}
    if token_file is not None:
        discovery["authorization"] = _bearer(token_file)
    job = {
        "job_name": "ray",
        "http_sd_configs": [discovery],
        "metric_relabel_configs": [RENAMING],
    }
    return _config(job, rules)


def plain(
    target: str = DEFAULT_TARGET, *, keys_file: str | None = None, rules: str | None = None
) -> dict[str, Any]:
    """One application by its own address: whichever router replica is reached answers for all of them.
    `keys_file`: holds an API key, when the application wants one."""
    job: dict[str, Any] = {"job_name": "tandem", "static_configs": [{"targets": [target]}]}
    if keys_file is not None:
        job["authorization"] = _bearer(keys_file)
    return _config(job, rules)


def _bearer(file: str) -> dict[str, str]:
    # Prometheus 2.42 sends no type to a service discovery unless it is written down.
    return {"type": "Bearer", "credentials_file": file}


def _config(job: dict[str, Any], rules: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {"global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}}
    if rules is not None:
        config["rule_files"] = [rules]
    config["scrape_configs"] = [job]
    return config
