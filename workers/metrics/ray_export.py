"""Metrics into Ray's own: Ray's agent of the machine serves them beside its series, as `ray_tandem_...`.

Prometheus finds the agents by Ray's service discovery, so who scrapes a Ray cluster has our series too, each
told by the process that counts it. Every value is handed to Ray as a gauge: of a counter what it has reached,
of a histogram its cumulative buckets under the names that a histogram has. Ray's own counters and histograms
take single increments and samples, which would cost on the path of every token, and never forget a series;
a gauge that is not set any more leaves the agent after two of its periods. Queries see no difference, since
they go by names: `rate` and `histogram_quantile` work as on the plain `/metrics`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.metrics_core import Metric
from ray.util.metrics import Gauge

PERIOD_S: Final = 5.0  # half of the period in which Ray's agent is told; less often, series would flicker
_log = logging.getLogger(__name__)


class RayExporter:
    """Hands families to Ray. One per process for each table; not thread-safe."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def export(self, families: Iterable[Metric]) -> None:
        """Sets every sample. Takes some microseconds each: not for an event loop."""
        for family in families:
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    names = tuple(sample.labels)
                    gauge = Gauge(sample.name, description=family.documentation, tag_keys=names)
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, tags=dict(sample.labels))


async def keep_exporting(families: Callable[[], Iterable[Metric]], *, period_s: float = PERIOD_S) -> None:
    """Exports until cancelled. What `families` returns is walked through in a thread, so it had better be a
    generator over what does not change. A failure is logged when it begins, and tried again: serving
    goes on."""
    exporter = RayExporter()
    has_failed = False
    while True:
        try:
            await asyncio.to_thread(exporter.export, families())
            has_failed = False
        except Exception as error:  # whatever Ray raises
            if not has_failed:
                _log.warning("metrics are not exported through Ray: %r", error)
            has_failed = True
        await asyncio.sleep(period_s)
