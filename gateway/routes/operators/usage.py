"""GET /admin/usage: what each API key and each project has used, for keys with the role "read"."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import product
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from gateway.http.metrics import TOKEN_KINDS
from gateway.keys.prices import NANO
from gateway.keys.usage import UsageRow, Use, by_project, total
from gateway.state import gateway_of
from gateway.store_keys import USAGE_DAYS

OPENMETRICS = "application/openmetrics-text"
USAGE_TABLE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {}, OPENMETRICS: {}}}}

router = APIRouter()  # for administrators


@router.get("/admin/usage", response_model=None, responses=USAGE_TABLE)
async def read_usage(
    request: Request,
    days: Annotated[int, Query(ge=1, le=USAGE_DAYS)] = 1,
    format: Annotated[
        Literal["json", "csv", "openmetrics"], Query(description="csv: a row for each day, key and tier")
    ] = "json",
    group_by: Annotated[
        Literal["key", "project"], Query(description="project: all keys of a project together")
    ] = "key",
) -> dict[str, Any] | Response:
    """Show what each key has used in each tier, by UTC day, today first, and in all these days together.

    The counts are those of all gateways.
    """
    rows_by_day = await gateway_of(request).usage.days(days)
    if group_by == "project":
        rows_by_day = {date: by_project(rows) for date, rows in rows_by_day.items()}
    if format == "csv":
        return Response(_table(rows_by_day), media_type="text/csv")
    if format == "openmetrics":
        now_s = gateway_of(request).clock.wall_ms() // 1000
        text: str = generate_latest(_Daily(rows_by_day, now_s))  # type: ignore[no-untyped-call]
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
    return {
        "total": [_row(row) for row in total(rows_by_day)],
        "days": [{"date": date, "usage": [_row(row) for row in rows]} for date, rows in rows_by_day.items()],
    }


def _table(rows_by_day: Mapping[str, list[UsageRow]]) -> str:
    """Return the usage as CSV. Open access has no name of a key. The sums of all days are left to the reader."""
    text = io.StringIO()
    columns = ["date", *_row(UsageRow(None, "", Use()))]
    table = csv.DictWriter(text, columns)
    table.writeheader()
    for date, rows in rows_by_day.items():
        table.writerows({"date": date, **_row(row)} for row in rows)
    return text.getvalue()


class _Daily(Collector):
    """The usage as gauges, with a sample for each day, at its last second; today's is of `now_s`.

    Samples of one series stand together, the oldest first, as OpenMetrics wants it. Open access has an empty `key`.
    """

    def __init__(self, rows_by_day: Mapping[str, list[UsageRow]], now_s: int) -> None:
        ends = {date: int(datetime.fromisoformat(f"{date}T23:59:59+00:00").timestamp()) for date in rows_by_day}
        dated = [(min(ends[date], now_s), row) for date, rows in rows_by_day.items() for row in rows]
        self._samples = sorted(dated, key=lambda sample: (_labels(sample[1]), sample[0]))

    def collect(self) -> Iterator[Metric]:
        names = ["key", "project", "tier"]
        requests = GaugeMetricFamily("tidegate_usage_daily_requests", "Requests of a UTC day.", labels=names)
        tokens = GaugeMetricFamily("tidegate_usage_daily_tokens", "Tokens of a UTC day.", labels=[*names, "kind"])
        cost = GaugeMetricFamily("tidegate_usage_daily_cost", "Cost of a UTC day by the price list.", labels=names)
        for at_s, row in self._samples:
            requests.add_metric(_labels(row), row.use.requests, at_s)
            cost.add_metric(_labels(row), row.use.cost_nano / NANO, at_s)
        for kind, (at_s, row) in product(TOKEN_KINDS, self._samples):
            tokens.add_metric([*_labels(row), kind], getattr(row.use, f"{kind}_tokens"), at_s)
        yield from (requests, tokens, cost)


def _labels(row: UsageRow) -> list[str]:
    return [row.key or "", row.project or "", row.tier]


def _row(row: UsageRow) -> dict[str, Any]:
    counts = asdict(row.use)
    cost = counts.pop("cost_nano") / NANO
    return {"key": row.key, "tier": row.tier, **counts, "project": row.project, "cost": cost}
