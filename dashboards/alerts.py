"""Alert rules for Prometheus, from the same metric tables as the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from router.telemetry import table
from workers.metrics import group
from workers.metrics.spec import MetricSpec

TTFT_OBJECTIVE_S: Final = 2.5  # a bound of the histogram, so that the quantile is exact there
_MIN_RATE = 0.05  # requests a second below which shares say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule. Summary and description are Prometheus templates."""

    name: str
    expr: str
    for_: str  # how long it must hold before anyone is told
    severity: str  # page: someone must act now; ticket: someone must look
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.for_,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


def _rate(spec: MetricSpec, window: str = "5m") -> str:
    return f"sum by (model) (rate({spec.shown_name}[{window}]))"


def _increase(spec: MetricSpec, window: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (increase({spec.shown_name}[{window}]))"


def _part(part: MetricSpec, limit: float) -> str:
    """Whether a part of all requests is above a limit, where there are some."""
    all_requests = f"({_rate(part)} + {_rate(table.REQUESTS)})"
    return f"{_rate(part)} / ({all_requests} > {_MIN_RATE:g}) > {limit:g}"


ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="TandemNoGroupReady",
        expr=f"count by (model) ({table.INFLIGHT.shown_name})"
        f" unless on (model) (sum by (model) ({group.UP.shown_name}) > 0)",
        for_="1m",
        severity="page",
        summary="No worker group of {{ $labels.model }} answers",
        description="Routers are there, and refuse every request. `tandem status` says what groups wait for.",
    ),
    Alert(
        name="TandemGroupDown",
        expr=f"max by (model, group) ({group.UP.shown_name}) == 0",
        for_="5m",
        severity="ticket",
        summary="Group {{ $labels.group }} does not answer",
        description="It has given no token since its last start. `tandem status` says what it waits for.",
    ),
    Alert(
        name="TandemFailures",
        expr=_part(table.SERVER_ERRORS, 0.05),
        for_="5m",
        severity="page",
        summary="{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail",
        description="Answers with 5xx. The page Tandem / Fleet has them by code.",
    ),
    Alert(
        name="TandemSlowFirstToken",
        expr="histogram_quantile(0.95, sum by (le, model)"
        f" (rate({table.TTFT.shown_name}_bucket[5m]))) > {TTFT_OBJECTIVE_S:g}",
        for_="10m",
        severity="ticket",
        summary="First tokens of {{ $labels.model }} take {{ $value | humanizeDuration }} (p95)",
        description=f"The objective is {TTFT_OBJECTIVE_S:g} s. Tandem / Worker groups shows the stage.",
    ),
    Alert(
        name="TandemKvPoolFull",
        expr=f'sum by (model, group) ({group.KV_BLOCKS.shown_name}{{state=~"active|transferring"}})'
        f" / sum by (model, group) ({group.KV_BLOCKS.shown_name}) > 0.95"
        f" and on (model, group) sum by (model, group) ({group.WAITING.shown_name}) > 0",
        for_="5m",
        severity="ticket",
        summary="The KV pool of {{ $labels.group }} is full and requests wait",
        description="More groups, larger pools or shorter contexts help.",
    ),
    Alert(
        name="TandemRefusals",
        expr=_part(table.REJECTED, 0.1),
        for_="5m",
        severity="page",
        summary="{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} are refused",
        description="There is no room for them, or no group. Tandem / Router has them by what was full.",
    ),
    Alert(
        name="TandemIndexGaps",
        expr=f"{_increase(table.INDEX_GAPS, '10m', 'model', 'replica')} > 0",
        for_="0m",
        severity="ticket",
        summary="Router {{ $labels.replica }} missed entries of a block log",
        description="It reads the log anew, and placed requests by what it had until then.",
    ),
    Alert(
        name="TandemTransferFailures",
        expr=f"{_increase(group.KV_TRANSFER_FAILURES, '10m', 'model', 'group')} > 0",
        for_="0m",
        severity="ticket",
        summary="Group {{ $labels.group }} could not read KV blocks",
        description="What it could not read it computed itself. Tandem / KV cache shows which groups.",
    ),
)


def rules() -> dict[str, Any]:
    """The content of a Prometheus rules file."""
    return {"groups": [{"name": "tandem", "rules": [alert.rule() for alert in ALERTS]}]}
