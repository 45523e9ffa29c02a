"""GET /admin/keys and GET /admin/usage: the API keys and projects in force, and what each of them has used.

Only administrators may use these endpoints. They never show a key: an id is the beginning of its digest.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from gateway.identity import ApiKey, Holder, Project
from gateway.keys.file import ID_DIGITS
from gateway.keys.prices import NANO
from gateway.keys.usage import UsageRow, Use, by_project, total
from gateway.state import gateway_of
from gateway.store_keys import USAGE_DAYS, spender

USAGE_TABLE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {}}}}

router = APIRouter()  # for administrators


@router.get("/admin/keys")
async def read_keys(request: Request) -> dict[str, Any]:
    """Show the keys in force on this gateway, and why the file in its present state is not used, if it is not."""
    gateway = gateway_of(request)
    source, keys = gateway.key_source, gateway.keyring.keys
    spent = await gateway.usage.spent()
    projects = {key.project.name: key.project for key in keys if key.project is not None}
    return {
        "source": str(source.path) if source.path is not None else None,
        "loaded_at": source.loaded_ms // 1000,
        "problem": source.problem or None,
        "open_access": gateway.keyring.is_open,
        "keys": [_key(key) | _budget(key, spent) for key in keys],
        "projects": [_limits(project) | _budget(project, spent) for project in projects.values()],
    }


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


def _key(key: ApiKey) -> dict[str, Any]:
    return _limits(key) | {
        "id": key.sha256.hex()[:ID_DIGITS],
        "project": key.project.name if key.project is not None else None,
        "tiers": sorted(key.tiers) if key.tiers is not None else None,
        "default_tier": key.default_tier,
        "admin": key.may("admin"),
        "role": key.role,
        "files_quota_mb": key.files_quota_mb,
        "weight": key.weight,
        "batch_concurrent_lines": key.batch_concurrent_lines,
        "batch_enqueued_tokens": key.batch_enqueued_tokens,
    }


def _limits(holder: Holder) -> dict[str, Any]:
    return {
        "name": holder.name,
        "requests_per_minute": holder.requests_per_minute,
        "tokens_per_minute": holder.tokens_per_minute,
        "concurrent_requests": holder.concurrent_requests,
    }


def _budget(holder: Holder, spent: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the budget of a key or a project, and what it has spent today and this month, with open reservations."""
    name = spender(holder.name, isinstance(holder, Project))
    used = [{"tokens": s.get(f"{name}:tokens", 0), "cost": s.get(f"{name}:cost", 0) / NANO} for s in spent]
    budget = None if holder.budget is None else asdict(holder.budget)
    return {"budget": budget, "spent": dict(zip(("day", "month"), used, strict=True))}


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
