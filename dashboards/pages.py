"""All pages, and all files that are built from this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import yaml

from dashboards import alerts, provisioning, scrape
from dashboards.fleet import FLEET
from dashboards.grafana import Dashboard
from dashboards.kv_cache import KV_CACHE
from dashboards.routing import ROUTING
from dashboards.worker_group import WORKER_GROUP

PAGES: Final[Mapping[str, Dashboard]] = {
    "fleet": FLEET,
    "group": WORKER_GROUP,
    "kv-cache": KV_CACHE,
    "router": ROUTING,
}
PAGES_FOLDER: Final = "tandem"  # of the JSON files, in what is built
SHIPPED_PATH: Final = "/var/lib/grafana/dashboards/tandem"  # where Grafana looks for pages in a container
_NOTES: Final[Mapping[str, str]] = {
    "alerts.yml": "For `rule_files` of Prometheus.",
    "prometheus-ray.yml": "Scrapes all nodes of a Ray cluster: Ray's series and ours. Not together with "
    "prometheus-plain.yml. On a cluster with Ray's token, as `tandem serve` starts it, add "
    "`authorization: {type: Bearer, credentials_file: FILE}` to the entry of http_sd_configs; FILE: "
    "~/.ray/auth_token, with its full path.",
    "prometheus-plain.yml": "Scrapes one application's /metrics. Not together with prometheus-ray.yml. "
    "With API keys on, add `authorization: {type: Bearer, credentials_file: FILE}` to the job.",
    "provisioning/dashboards/tandem.yml": "Copy beside Ray's default.yml, and the pages to `path`.",
    "provisioning/datasources/tandem.yml": "Copy beside Ray's default.yml.",
}


def page_text(page: Dashboard) -> str:
    """The content of a page's JSON file."""
    return json.dumps(page.json(), indent=1) + "\n"


def files(pages_path: str = SHIPPED_PATH) -> dict[str, str]:
    """Content by name of everything that `tandem dashboards build` writes; `pages_path`: where Grafana will
    find the folder of pages."""
    configs: dict[str, dict[str, Any]] = {
        "alerts.yml": alerts.rules(),
        "prometheus-ray.yml": scrape.through_ray(rules="alerts.yml"),
        "prometheus-plain.yml": scrape.plain(rules="alerts.yml"),
        "provisioning/dashboards/tandem.yml": provisioning.dashboards_file(pages_path),
        "provisioning/datasources/tandem.yml": provisioning.datasources_file(),
    }
    return {
        **{f"{PAGES_FOLDER}/{name}.json": page_text(page) for name, page in PAGES.items()},
        **{name: f"# {_NOTES[name]}\n{_yaml(config)}" for name, config in configs.items()},
    }


def _yaml(config: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(config, sort_keys=False, width=1000)
    return text
