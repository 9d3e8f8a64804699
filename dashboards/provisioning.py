"""Files by which Grafana finds a Prometheus and the pages at its start, beside those that Ray writes.

Ray's files are `provisioning/{dashboards,datasources}/default.yml`; ours lie beside them as `tandem.yml`,
with a folder and a data source of their own. The data source is not the default one: Ray's is, and Grafana
refuses to start with two.
"""

from __future__ import annotations

from typing import Any, Final

FOLDER: Final = "Tandem"
FOLDER_UID: Final = "tandem"
DATASOURCE_NAME: Final = "Tandem Prometheus"
DATASOURCE_UID: Final = "tandem-prometheus"
DEFAULT_PROMETHEUS: Final = "http://127.0.0.1:9090"


def datasource(prometheus: str) -> dict[str, Any]:
    """A Prometheus as Grafana's API and its provisioning describe it."""
    return {
        "uid": DATASOURCE_UID,
        "name": DATASOURCE_NAME,
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus,
        "isDefault": False,
        "jsonData": {"httpMethod": "POST", "timeInterval": "10s"},
    }


def datasources_file(prometheus: str = DEFAULT_PROMETHEUS) -> dict[str, Any]:
    """The content of provisioning/datasources/tandem.yml."""
    return {"apiVersion": 1, "datasources": [datasource(prometheus)]}


def dashboards_file(path: str) -> dict[str, Any]:
    """The content of provisioning/dashboards/tandem.yml; `path`: where Grafana finds the JSON files."""
    provider = {
        "name": FOLDER,
        "folder": FOLDER,
        "folderUid": FOLDER_UID,
        "type": "file",
        "allowUiUpdates": True,
        "options": {"path": path},
    }
    return {"apiVersion": 1, "providers": [provider]}
