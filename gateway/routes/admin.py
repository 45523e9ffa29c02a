"""/admin: show and change the tiers in force, and explain the SLA controllers' decisions. Administrators only."""

import asyncio
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, Request
from sse_starlette import EventSourceResponse

from gateway.protocol.errors import ApiError, invalid_request, retry_after
from gateway.protocol.json_body import parse_json_object
from gateway.routes.dependencies import Administrator
from gateway.routes.sla_feed import PERIOD_S, SlaFeed, SlaStreamResponse, explain
from gateway.state import gateway_of
from scheduler.config import TierConfigError
from scheduler.reload.coordinator import Applied, Late, Outcome, Refused, TierChanges

YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})
RETRY_S = 5.0  # Retry-After of a change that not every part has made; parts look for changes about once a second

DOCUMENT: dict[str, Any] = {"type": "object", "description": "What tiers.yaml holds: default_tier, batch_tier, tiers."}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": DOCUMENT}, "application/yaml": {"schema": DOCUMENT}},
    }
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "Not a tiers file; `param` names the key. The old tiers stay in force everywhere."},
    409: {"description": "Something still needs the old tiers. They stay in force everywhere."},
    503: {"description": "Not every gateway and worker has answered; the message names those that have not."},
}
SLA_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": (
            f"Event `sla`, every {PERIOD_S} s: the object of GET /admin/sla with `at_ms` (Unix time in ms) and "
            "`waiting` (per tier: requests, prompt_tokens, output_tokens). A worker's `decisions` are those that no "
            "earlier event of this stream had. Event `error`, once, when the store stops answering: OpenAI's error "
            "object. `sla` events come again when the store answers."
        ),
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def tier_changes_of(request: Request) -> TierChanges:
    changes = gateway_of(request).tier_changes
    if changes is None:
        raise ApiError(404, "The tiers of this server cannot be changed while it runs.")
    return changes


Changes = Annotated[TierChanges, Depends(tier_changes_of)]

router = APIRouter(
    tags=["admin"], dependencies=[Administrator], responses={403: {"description": "Not an administrator."}}
)


@router.get("/admin/tiers")
async def read_tiers(changes: Changes) -> dict[str, Any]:
    """Show the tiers in force with every default filled in, their source, and the generation that each part has."""
    in_force, parts = changes.follower.in_force, await changes.parts()
    return {
        "generation": in_force.generation,
        "source": in_force.source,
        "set_at": in_force.set_ms // 1000,
        "parts": [{"part": f.part, "generation": f.generation} for f in parts],
        "document": in_force.tiers.document(defaults=True),
    }


@router.post("/admin/tiers", responses=REFUSALS, openapi_extra=BODY)
async def change_tiers(request: Request, changes: Changes) -> dict[str, Any]:
    """Put these tiers in force on every gateway and worker of the store. Answers when all of them have the tiers."""
    document = await _read_document(request)
    try:
        return describe_outcome(await changes.change(document, "POST /admin/tiers"))
    except TierConfigError as error:
        raise _invalid_tiers(error) from None


@router.post("/admin/tiers/reload", responses=REFUSALS)
async def reload_tiers(changes: Changes) -> dict[str, Any]:
    """Read this gateway's tiers file again and put it in force on every gateway and worker of the store."""
    try:
        return describe_outcome(await changes.reload())
    except TierConfigError as error:
        raise _invalid_tiers(error) from None


@router.get("/admin/sla")
async def explain_sla(request: Request) -> dict[str, Any]:
    """Show each worker's knobs, the signals that move them and the last decisions, and the predicted first tokens."""
    client = gateway_of(request).client
    return await explain(client, await client.backlogs())


@router.get("/admin/sla/stream", response_class=EventSourceResponse, responses=SLA_EVENTS)
async def watch_sla(request: Request) -> SlaStreamResponse:
    """Send what GET /admin/sla shows twice a second, as server-sent events, until the client hangs up or the gateway
    drains."""
    feed: SlaFeed = request.app.state.sla_feed
    return SlaStreamResponse(feed)


async def _read_document(request: Request) -> object:
    """Return the body as plain data: YAML if its content type says so, else JSON. Raises `ApiError` 400."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = await request.body()
    if kind not in YAML_TYPES:
        return parse_json_object(data)
    try:
        return await asyncio.to_thread(yaml.safe_load, data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
        raise invalid_request("The body is not valid YAML.", code="invalid_yaml") from None


def _invalid_tiers(error: TierConfigError) -> ApiError:
    return invalid_request(f"The tiers are refused; the old ones stay in force. {error}", error.key, "invalid_tiers")


def describe_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return the answer to a change. Raises `ApiError` 409 if it was refused, 503 if a part has not confirmed it."""
    match outcome:
        case Applied(in_force, parts, changed):
            generation, source = in_force.generation, in_force.source
            return {"changed": changed, "generation": generation, "source": source, "parts": list(parts)}
        case Refused(message):
            text = f"The tiers are refused; the old ones stay in force. {message}"
            raise ApiError(409, text, code="tiers_refused", headers={"x-should-retry": "false"})
        case Late(parts, in_force):
            applied = "The new tiers are in force, but these parts do not have them yet"
            unchanged = "Nothing has changed, because these parts do not answer"
            text = f"{applied if in_force else unchanged}: {', '.join(parts)}."
            raise ApiError(503, text, "server_error", code="tiers_not_applied", headers=retry_after(RETRY_S))
