"""/admin: the tiers in force and their change, and why the SLA controller does what it does."""

from typing import Any

from fastapi import APIRouter, Request

from gateway.admin import (
    Administrator,
    Changes,
    explanations,
    in_force,
    read_document,
    refused_document,
    told,
)
from gateway.state import gateway_of
from scheduler.config import TierConfigError

DOCUMENT: dict[str, Any] = {"type": "object", "description": "What tiers.yaml holds: default_tier, batch_tier, tiers."}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "Not a tiers file; `param` names the key. The old tiers stay in force everywhere."},
    409: {"description": "Something still needs the old tiers. They stay in force everywhere."},
    503: {"description": "Not every gateway and worker answers; the message names those."},
}

router = APIRouter(
    tags=["admin"], dependencies=[Administrator], responses={403: {"description": "Not an administrator."}}
)


@router.get("/admin/tiers")
async def read_tiers(changes: Changes) -> dict[str, Any]:
    """The tiers in force, where they came from, and which generation each part has."""
    return in_force(changes, await changes.parts())


@router.post(
    "/admin/tiers",
    responses=REFUSALS,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": DOCUMENT}, "application/yaml": {"schema": DOCUMENT}},
        }
    },
)
async def change_tiers(request: Request, changes: Changes) -> dict[str, Any]:
    """Put these tiers in force on every gateway and worker of the store. Answers when all have them."""
    document = await read_document(request)
    try:
        return told(await changes.change(document, "POST /admin/tiers"))
    except TierConfigError as error:
        raise refused_document(error) from None


@router.post("/admin/tiers/reload", responses=REFUSALS)
async def reload_tiers(changes: Changes) -> dict[str, Any]:
    """Read this gateway's tiers file again, and put it in force likewise."""
    try:
        return told(await changes.reload())
    except TierConfigError as error:
        raise refused_document(error) from None


@router.get("/admin/sla")
async def explain_sla(request: Request) -> dict[str, Any]:
    """For each worker: every tier's knobs, the signals that move them, and the last decisions."""
    return await explanations(gateway_of(request))
