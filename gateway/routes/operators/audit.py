"""GET /admin/audit: who changed what, for keys with the role "read"; and how other routes write it down."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from gateway.audit import ENTRY_ID
from gateway.protocol.errors import invalid_value
from gateway.state import gateway_of

router = APIRouter()


@router.get("/admin/audit")
async def read_audit(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> dict[str, Any]:
    """List what was changed, the newest first: tiers, API keys, prices, dead letters."""
    if after is not None and not ENTRY_ID.fullmatch(after):
        raise invalid_value("after", "Invalid value for 'after': it must be the id of an entry.")
    found = await gateway_of(request).audit.page(limit + 1, after)
    data = [{"object": "audit_entry", **asdict(entry)} for entry in found[:limit]]
    return {"object": "list", "data": data, "has_more": len(found) > limit}


async def audited(request: Request, action: str, subject: str) -> None:
    """Write down what the caller has done."""
    key: str | None = getattr(request.state, "key_name", None)
    address = request.client.host if request.client is not None else None
    await gateway_of(request).audit.add(action, subject, key, address)
