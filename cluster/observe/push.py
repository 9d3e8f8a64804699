"""Pages to a Grafana: a folder, a data source and the pages, each found again by its uid.

Pushing twice changes nothing the second time. A page that was edited in Grafana meanwhile is not written over
unless that is asked for. Grafana from 12 on has an API of resources, whose newest stable version is used;
before that, and without it, the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.observe.grafana_api import GrafanaApi, Reply
from cluster.observe.prometheus_api import ObserveError
from dashboards.grafana import Dashboard
from dashboards.provisioning import DATASOURCE_UID, FOLDER, FOLDER_UID, datasource

_GROUP: Final = "/apis/dashboard.grafana.app"
_VERSIONS: Final = ("v1", "v1beta1")  # of the classic schema, newest first
_MESSAGE: Final = "tandem dashboards push"
_EDITED: Final = (
    "has been changed in Grafana while it was pushed; push again, or write over it with --overwrite"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What became of one thing."""

    kind: str  # folder, data source, page
    name: str
    result: str  # created, updated, unchanged


def push(
    api: GrafanaApi,
    pages: Iterable[Dashboard],
    *,
    prometheus: str | None,
    overwrite: bool = False,
    report: Callable[[Pushed], None],
) -> None:
    """Everything, in the order in which one needs the other. `prometheus`: its address as Grafana reaches it;
    None leaves data sources alone. Raises ObserveError; what was reported until then is done."""
    _check_health(api)
    report(Pushed(kind="folder", name=FOLDER, result=_push_folder(api)))
    if prometheus is not None:
        wanted = datasource(prometheus)
        report(Pushed(kind="data source", name=wanted["name"], result=_push_datasource(api, wanted)))
    version = _resource_version(api)
    for page in pages:
        if version is None:
            result = _push_classic(api, page, overwrite)
        else:
            result = _push_resource(api, page, f"{_GROUP}/{version}", overwrite)
        report(Pushed(kind="page", name=page.title, result=result))


def _check_health(api: GrafanaApi) -> None:
    health = api.get("/api/health")
    if "database" not in health.body:
        raise api.stranger()
    if health.body.get("database") != "ok":
        raise ObserveError(
            f"Grafana at {api.shown} is not healthy: its database is {health.body.get('database')!r}"
        )


def _push_folder(api: GrafanaApi) -> str:
    path = f"/api/folders/{FOLDER_UID}"
    if api.get(path).is_ok:
        return "unchanged"  # whatever it is called now
    reply = api.send("POST", "/api/folders", {"uid": FOLDER_UID, "title": FOLDER})
    if reply.status in (409, 412) and api.get(path).is_ok:  # somebody else was faster
        return "unchanged"
    api.expect(reply, f"the folder {FOLDER!r}")
    return "created"


def _push_datasource(api: GrafanaApi, wanted: Mapping[str, Any]) -> str:
    path = f"/api/datasources/uid/{DATASOURCE_UID}"
    there = api.get(path)
    if not there.is_ok:
        reply = api.send("POST", "/api/datasources", wanted)
        if reply.status == 409:
            raise ObserveError(
                f"Grafana at {api.shown} has another data source called {wanted['name']!r}; rename that one, "
                "or push without --prometheus"
            )
        api.expect(reply, "the data source")
        return "created"
    if all(there.body.get(key) == value for key, value in wanted.items()):
        return "unchanged"
    api.expect(api.send("PUT", path, wanted), "the data source")
    return "updated"


def _resource_version(api: GrafanaApi) -> str | None:
    """Of the API of resources; None where Grafana has only the older one."""
    group = api.get(_GROUP)
    rows = group.body.get("versions") if group.is_ok else None
    served = (
        {row.get("version") for row in rows if isinstance(row, dict) and isinstance(row.get("version"), str)}
        if isinstance(rows, list)
        else set()
    )
    return next((version for version in _VERSIONS if version in served), None)


def _push_classic(api: GrafanaApi, page: Dashboard, overwrite: bool) -> str:
    there = api.get(f"/api/dashboards/uid/{page.uid}")
    spec = page.json()
    found = there.body.get("dashboard")
    folder = there.body.get("meta")
    if isinstance(found, dict):
        if _same(spec, found) and isinstance(folder, dict) and folder.get("folderUid") == FOLDER_UID:
            return "unchanged"
        spec["version"] = found.get("version", 0)
    body = {"dashboard": spec, "folderUid": FOLDER_UID, "message": _MESSAGE, "overwrite": overwrite}
    reply = api.send("POST", "/api/dashboards/db", body)
    _check_conflict(api, reply, page)
    api.expect(reply, f"the page {page.title!r}")
    return "updated" if there.is_ok else "created"


def _push_resource(api: GrafanaApi, page: Dashboard, base: str, overwrite: bool) -> str:
    path = f"{base}/namespaces/default/dashboards"
    there = api.get(f"{path}/{page.uid}")
    annotations = {"grafana.app/folder": FOLDER_UID, "grafana.app/message": _MESSAGE}
    metadata: dict[str, Any] = {"name": page.uid, "annotations": annotations}
    spec = {key: value for key, value in page.json().items() if key not in ("uid", "version")}
    body = {"metadata": metadata, "spec": spec}
    if not there.is_ok:
        reply = api.send("POST", path, body)
    else:
        known = _mapping(there.body.get("metadata"))
        is_here = _mapping(known.get("annotations")).get("grafana.app/folder") == FOLDER_UID
        if is_here and _same(spec, there.body.get("spec")):
            return "unchanged"
        if not overwrite:
            metadata["resourceVersion"] = known.get("resourceVersion")
        reply = api.send("PUT", f"{path}/{page.uid}", body)
    _check_conflict(api, reply, page)
    api.expect(reply, f"the page {page.title!r}")
    return "updated" if there.is_ok else "created"


def _mapping(value: object) -> Mapping[str, Any]:
    """What should be one; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _same(ours: Mapping[str, Any], theirs: object) -> bool:
    """Whether Grafana has the page as we would write it; it adds fields of its own."""
    if not isinstance(theirs, dict):
        return False
    return all(theirs.get(key) == value for key, value in ours.items() if key != "version")


def _check_conflict(api: GrafanaApi, reply: Reply, page: Dashboard) -> None:
    if reply.status in (409, 412):
        raise ObserveError(f"the page {page.title!r} of Grafana at {api.shown} {_EDITED}")
