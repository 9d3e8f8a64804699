"""Handing metrics to Ray: a failure is told once for as long as it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from prometheus_client.metrics_core import Metric

from workers.metrics.ray_export import keep_exporting


def test_a_failure_is_told_when_it_begins_and_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    fails = iter([True, True, False, True, False])
    is_done = asyncio.Event()

    def families() -> Iterable[Metric]:
        if (has_failed := next(fails, None)) is None:
            is_done.set()
        if has_failed:
            raise OSError("Ray is away")
        return []

    async def run() -> None:
        exporting = asyncio.create_task(keep_exporting(families, period_s=0.0))
        await asyncio.wait_for(is_done.wait(), 5.0)
        exporting.cancel()
        await asyncio.gather(exporting, return_exceptions=True)

    asyncio.run(run())
    assert caplog.messages == ["metrics are not exported through Ray: OSError('Ray is away')"] * 2
