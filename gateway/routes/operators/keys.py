"""GET /admin/keys and GET /admin/usage: the API keys in force, and what each of them has used.

Only administrators may use these endpoints. They never show a key: an id is the beginning of its digest.
"""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from gateway.identity import ApiKey
from gateway.keys.file import ID_DIGITS
from gateway.keys.usage import MAX_DAYS, UsageRow, total
from gateway.state import gateway_of

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


@router.get("/admin/usage")
async def read_usage(request: Request, days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 1) -> dict[str, Any]:
    """Show what each key has used in each tier, by UTC day, today first, and in all these days together.

    The counts are those of all gateways. Other gateways write theirs every few seconds.
    """
    rows_by_day = await gateway_of(request).usage.days(days)
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
        "admin": key.admin,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "concurrent_requests": key.concurrent_requests,
        "files_quota_mb": key.files_quota_mb,
        "weight": key.weight,
        "batch_concurrent_lines": key.batch_concurrent_lines,
        "batch_enqueued_tokens": key.batch_enqueued_tokens,
    }


def _row(row: UsageRow) -> dict[str, Any]:
    return {"key": row.key, "tier": row.tier, **asdict(row.use)}
