"""The /admin endpoints: show and change the tiers in force, and explain the decisions of the SLA controllers.

They need the role "read", and the changes the role "admin".
"""

import asyncio
from functools import partial
from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Depends, Request
from sse_starlette import EventSourceResponse

from gateway.protocol.errors import ApiError, invalid_request, retry_after, too_large
from gateway.protocol.json_body import parse_json_object
from gateway.routes.dependencies import Administrator, is_reader
from gateway.routes.operators.audit import audited
from gateway.routes.operators.sla_feed import PERIOD_S, SlaFeed, SlaStreamResponse, explain
from gateway.state import OfModel
from scheduler.config import TierConfigError
from scheduler.reload.coordinator import Applied, ChangeResult, Late, Refused, TierChanges
from scheduler.yaml_file import StrictLoader, YamlFault, parse_yaml

MAX_DOCUMENT_BYTES = 2**16  # ten times the shipped tiers.yaml with all its comments
YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})
# Seconds of Retry-After if a gateway or worker has not confirmed a change. They look for changes about once a second.
RETRY_S = 5.0

DOCUMENT: dict[str, Any] = {"type": "object", "description": "Content of tiers.yaml: default_tier, batch_tier, tiers."}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": DOCUMENT}, "application/yaml": {"schema": DOCUMENT}},
    }
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "Not a valid tiers file; `param` names the key. The old tiers stay in force everywhere."},
    409: {"description": "Something still needs the old tiers, so the old tiers stay in force everywhere."},
    503: {"description": "Some gateways or workers have not answered; the message names them."},
}
SLA_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": (
            f"The event `sla` is sent every {PERIOD_S} s. It has the object of GET /admin/sla, and also `at_ms` (Unix "
            "time in ms) and `waiting` (per tier: requests, prompt_tokens, output_tokens). The `decisions` of a worker "
            "are only those that no earlier event of this stream had. The event `error` is sent once if the store "
            "stops answering. It has OpenAI's error object. `sla` events continue when the store answers again."
        ),
        "content": {"text/event-stream": {}},
    }
}


def tier_changes_of(served: OfModel) -> TierChanges:
    return served.tier_changes


Changes = Annotated[TierChanges, Depends(tier_changes_of)]

router = APIRouter()  # for administrators


@router.get("/admin/tiers")
async def read_tiers(changes: Changes) -> dict[str, Any]:
    """Show the tiers in force with every default filled in, their source, and which generation each part uses.

    A part is a gateway or a worker.
    """
    in_force, parts = changes.follower.in_force, await changes.parts()
    return {
        "generation": in_force.generation,
        "source": in_force.source,
        "set_at": in_force.set_ms // 1000,
        "parts": [{"part": f.part, "generation": f.generation} for f in parts],
        "document": in_force.tiers.document(defaults=True),
    }


@router.post("/admin/tiers", dependencies=[Administrator], responses=REFUSALS, openapi_extra=BODY)
async def change_tiers(request: Request, changes: Changes) -> dict[str, Any]:
    """Put the tiers in the body in force on every gateway and worker of the store.

    The answer is sent when all gateways and workers use these tiers.
    """
    document = await _read_document(request)
    try:
        result = await changes.change(document, "POST /admin/tiers")
    except TierConfigError as error:
        raise _invalid_tiers(error) from None
    await _audit_change(request, "tiers.change", result)
    return describe_change(result)


@router.post("/admin/tiers/reload", dependencies=[Administrator], responses=REFUSALS)
async def reload_tiers(request: Request, changes: Changes) -> dict[str, Any]:
    """Read this gateway's tiers file again, and put its tiers in force on every gateway and worker of the store."""
    try:
        result = await changes.reload()
    except TierConfigError as error:
        raise _invalid_tiers(error) from None
    await _audit_change(request, "tiers.reload", result)
    return describe_change(result)


@router.get("/admin/sla")
async def explain_sla(served: OfModel) -> dict[str, Any]:
    """Show each worker's knobs, the signals that move the knobs, and the last decisions; also the predicted TTFTs."""
    return await explain(served.client, await served.client.backlogs())


@router.get("/admin/sla/stream", response_class=EventSourceResponse, responses=SLA_EVENTS)
async def watch_sla(request: Request, served: OfModel) -> SlaStreamResponse:
    """Send the content of GET /admin/sla twice a second, as server-sent events.

    The stream ends when the client hangs up, its key is revoked, or the gateway drains.
    """
    feed: SlaFeed = request.app.state.sla_feeds[served.name]
    return SlaStreamResponse(feed, partial(is_reader, request))


async def _audit_change(request: Request, action: str, result: ChangeResult) -> None:
    """Write down that other tiers are in force, also if some parts do not have them yet."""
    match result:
        case Applied(in_force, _, changed) if changed:
            await audited(request, action, f"generation {in_force.generation}")
        case Late(parts, in_force) if in_force:
            await audited(request, action, f"late: {', '.join(parts)}")


async def _read_document(request: Request) -> object:
    """Return the body as plain data. It is parsed as YAML if the content type says so, else as JSON.

    Raises `ApiError` 400 if the body cannot be parsed.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = await request.body()
    if len(data) > MAX_DOCUMENT_BYTES:
        raise too_large(MAX_DOCUMENT_BYTES)
    if kind not in YAML_TYPES:
        return parse_json_object(data)
    try:
        return await asyncio.to_thread(parse_yaml, data.decode(), _PlainLoader)
    except (YamlFault, UnicodeDecodeError) as error:
        fault = error if isinstance(error, YamlFault) else "not UTF-8"
        raise invalid_request(f"The body is {fault}.", code="invalid_yaml") from None


class _PlainLoader(StrictLoader):
    """A loader without aliases, and so without merges: with them, a few lines become gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (`*name`) are not accepted here", None)
        return super().compose_node(parent, index)


def _invalid_tiers(error: TierConfigError) -> ApiError:
    return invalid_request(f"The tiers are refused; the old ones stay in force. {error}", error.key, "invalid_tiers")


def describe_change(result: ChangeResult) -> dict[str, Any]:
    """Return the answer to a change of the tiers.

    Raises `ApiError` 409 if the change was refused, and 503 if a gateway or worker has not confirmed the change.
    """
    match result:
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
