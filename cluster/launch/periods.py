"""How often the processes of a local cluster wake up while nothing happens.

Ray's own periods are for clusters with cores to spare. Nobody waits for what is rarer here: requests
do not pass through it, groups that fail are noticed by the routers' own connections, and what is shown is a
few seconds older. What each takes: benchmarks/NOTES_AMX.md.
"""

from __future__ import annotations

from typing import Final

# Environment of all processes of the cluster; one that is set already is left as it is, but deployment files
# set the three of Serve again for its controller.
PERIODS: Final = {
    # Serve's controller asks Ray for all nodes, and looks at every replica: 10 times a second without this.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Every replica and proxy counts for Ray's agent, which is told each 10 s: 10 times a second without.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    # An ingress that has died is replaced when the third look has not found it: 10 s apart without, in which
    # connections are refused.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # The agent looks at all processes for the dashboard, which asks it each 15 s: each 5 s without.
    "REPORTER_UPDATE_INTERVAL_MS": "15000",
    # The dashboard looks at its own processes, down to their pages: each 5 s without.
    "METRICS_RECORD_INTERVAL_S": "30",
    # The agent looks for files of events: each 2 s without.
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "10",
}
