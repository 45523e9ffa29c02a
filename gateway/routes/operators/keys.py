"""GET /admin/keys and GET /admin/usage: the API keys in force, and what each of them has used.

Only administrators may use these endpoints. They never show a key: an id is the beginning of its digest.
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from gateway.identity import ApiKey
from gateway.keys.file import ID_DIGITS
from gateway.keys.usage import MAX_DAYS, NAMES, UsageRow, total
from gateway.state import gateway_of

USAGE_TABLE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {}}}}

router = APIRouter()  # for administrators


@router.get("/admin/keys")
async def read_keys(request: Request) -> dict[str, Any]:
    """Show the keys in force on this gateway, and why the file in its present state is not used, if it is not."""
    gateway = gateway_of(request)
    source = gateway.key_source
    return {
        "source": str(source.path) if source.path is not None else None,
        "loaded_at": source.loaded_ms // 1000,
        "problem": source.problem or None,
        "open_access": gateway.keyring.is_open,
        "keys": [_key(key) for key in gateway.keyring.keys],
    }


@router.get("/admin/usage", response_model=None, responses=USAGE_TABLE)
async def read_usage(
    request: Request,
    days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 1,
    format: Annotated[Literal["json", "csv"], Query(description="csv: a row for each day, key and tier")] = "json",
) -> dict[str, Any] | Response:
    """Show what each key has used in each tier, by UTC day, today first, and in all these days together.

    The counts are those of all gateways. Other gateways write theirs every few seconds.
    """
    rows_by_day = await gateway_of(request).usage.days(days)
    if format == "csv":
        return Response(_table(rows_by_day), media_type="text/csv")
    return {
        "total": [_row(row) for row in total(rows_by_day)],
        "days": [{"date": date, "usage": [_row(row) for row in rows]} for date, rows in rows_by_day.items()],
    }


def _key(key: ApiKey) -> dict[str, Any]:
    return {
        "name": key.name,
        "id": key.sha256.hex()[:ID_DIGITS],
        "tiers": sorted(key.tiers) if key.tiers is not None else None,
        "default_tier": key.default_tier,
        "admin": key.may("admin"),
        "role": key.role,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "concurrent_requests": key.concurrent_requests,
        "files_quota_mb": key.files_quota_mb,
        "weight": key.weight,
        "batch_concurrent_lines": key.batch_concurrent_lines,
        "batch_enqueued_tokens": key.batch_enqueued_tokens,
    }


def _table(rows_by_day: Mapping[str, list[UsageRow]]) -> str:
    """Return the usage as CSV. Open access has no name of a key. The sums of all days are left to the reader."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["date", "key", "tier", *NAMES])
    for date, rows in rows_by_day.items():
        table.writerows([date, row.key, row.tier, *asdict(row.use).values()] for row in rows)
    return text.getvalue()


def _row(row: UsageRow) -> dict[str, Any]:
    return {"key": row.key, "tier": row.tier, **asdict(row.use)}
