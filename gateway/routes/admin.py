"""/admin: the tiers in force and their change, and why the SLA controller does what it does.

With configured keys, those with `admin: true` may administrate. Where access is open, programs on this machine may:
known by the peer's address, and by the name that they call the server, so that a web page whose name was pointed at
127.0.0.1 stays outside.
"""

import asyncio
import json
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

import yaml
from fastapi import APIRouter, Depends, Request

from gateway.protocol.errors import ApiError, invalid_request, retry_after
from gateway.protocol.json_body import parse_json_object
from gateway.routes.dependencies import Caller
from gateway.state import Gateway, gateway_of
from scheduler.config import TierConfigError
from scheduler.reload.coordinator import Applied, Late, Outcome, Refused, TierChanges
from scheduler.reload.store import Follower

DOCUMENT: dict[str, Any] = {"type": "object", "description": "What tiers.yaml holds: default_tier, batch_tier, tiers."}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "Not a tiers file; `param` names the key. The old tiers stay in force everywhere."},
    409: {"description": "Something still needs the old tiers. They stay in force everywhere."},
    503: {"description": "Not every gateway and worker answers; the message names those."},
}
YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})
RETRY_S = 5.0


async def administrator(request: Request, key: Caller) -> None:
    """Raises `ApiError` 403 for everybody else."""
    if key is not None and not key.admin:
        message = "This API key may not administrate: that takes `admin: true` in the keys file."
        raise ApiError(403, message, code="insufficient_permissions")
    if key is None and not _is_from_here(request):
        message = "Without API keys, administration is open to programs on the server's own machine only."
        raise ApiError(403, message, code="insufficient_permissions")


Administrator = Depends(administrator)


def _is_from_here(request: Request) -> bool:
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return (
        request.client is not None and _is_loopback(request.client.host) and (name == "localhost" or _is_loopback(name))
    )


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def tier_changes_of(request: Request) -> TierChanges:
    changes = gateway_of(request).tier_changes
    if changes is None:
        raise ApiError(404, "The tiers of this server cannot be changed while it runs.")
    return changes


Changes = Annotated[TierChanges, Depends(tier_changes_of)]


async def read_document(request: Request) -> object:
    """The body: YAML where its type says so, else JSON. Raises `ApiError` 400."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = await request.body()
    if kind not in YAML_TYPES:
        return parse_json_object(data)
    try:
        return await asyncio.to_thread(yaml.safe_load, data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
        raise invalid_request("The body is not valid YAML.", code="invalid_yaml") from None


def refused_document(error: TierConfigError) -> ApiError:
    return invalid_request(f"The tiers are refused; the old ones stay in force. {error}", error.key, "invalid_tiers")


def told(outcome: Outcome) -> dict[str, Any]:
    """The answer to a change. Raises `ApiError` 409 or 503 where it was not made everywhere."""
    match outcome:
        case Applied(in_force, parts, changed):
            generation, source = in_force.generation, in_force.source
            return {"changed": changed, "generation": generation, "source": source, "parts": list(parts)}
        case Refused(message):
            text = f"The tiers are refused; the old ones stay in force. {message}"
            raise ApiError(409, text, code="tiers_refused", headers={"x-should-retry": "false"})
        case Late(parts, in_force):
            done = "The new tiers are in force, but these do not have them yet" if in_force else NOTHING_CHANGED
            text = f"{done}: {', '.join(parts)}."
            raise ApiError(503, text, "server_error", code="tiers_not_applied", headers=retry_after(RETRY_S))


NOTHING_CHANGED = "Nothing has changed, because these do not answer"


def in_force(changes: TierChanges, parts: list[Follower]) -> dict[str, Any]:
    """What this gateway follows, with every default filled in, and which generation each part has."""
    now = changes.follower.in_force
    return {
        "generation": now.generation,
        "source": now.source,
        "set_at": now.set_ms // 1000,
        "parts": [{"part": f.part, "generation": f.generation} for f in parts],
        "document": now.tiers.document(defaults=True),
    }


async def explanations(gateway: Gateway) -> dict[str, Any]:
    """Each worker's controller in its own words, from its last heartbeat; and what this gateway's admission predicts
    for a short request that came now."""
    said = await gateway.client.worker_sla()
    predicted_s = gateway.client.predicted_ttfts_s(await gateway.client.backlogs())
    workers = [{"id": worker_id, **json.loads(text)} for worker_id, text in said.items()]
    return {"predicted_ttft_s": predicted_s, "workers": workers}


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
