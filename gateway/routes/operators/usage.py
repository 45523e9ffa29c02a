"""GET /admin/usage: what each API key and each project has used, for keys with the role "read"."""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from gateway.keys.prices import NANO
from gateway.keys.usage import UsageRow, Use, by_project, total
from gateway.state import gateway_of
from gateway.store_keys import USAGE_DAYS

USAGE_TABLE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {}}}}

router = APIRouter()  # for administrators


@router.get("/admin/usage", response_model=None, responses=USAGE_TABLE)
async def read_usage(
    request: Request,
    days: Annotated[int, Query(ge=1, le=USAGE_DAYS)] = 1,
    format: Annotated[Literal["json", "csv"], Query(description="csv: a row for each day, key and tier")] = "json",
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


def _row(row: UsageRow) -> dict[str, Any]:
    counts = asdict(row.use)
    cost = counts.pop("cost_nano") / NANO
    return {"key": row.key, "tier": row.tier, **counts, "project": row.project, "cost": cost}
