"""The /v1/conversations endpoints: conversations, and the items in them.

Translates between HTTP and the conversations of the response service. An API key sees only its own.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, field_validator

from gateway.dialects.responses.items import SentItem, few_pieces, items_left_out, served_items
from gateway.jobs.responses.conversations import Conversations, no_such_item
from gateway.protocol.bodies.options import Metadata
from gateway.protocol.bodies.unsupported import ignored_header
from gateway.protocol.json_body import Body, hold_object, parse
from gateway.protocol.openapi import json_body
from gateway.routes.chat import json_response
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.files import Owner
from gateway.routes.responses import After, Limit, Order, item_page
from gateway.state import gateway_of

MAX_ITEMS = 20  # of one call, as in OpenAI's API

router = APIRouter(tags=["responses"])

Items = Annotated[list[SentItem], Field(max_length=MAX_ITEMS, fail_fast=True)]


class NewConversation(Body):
    items: Items | None = None
    metadata: Metadata | None = None

    _few_pieces = field_validator("items", mode="before")(few_pieces)


class ChangedConversation(Body):
    metadata: Metadata | None


class NewItems(Body):
    items: Items

    _few_pieces = field_validator("items", mode="before")(few_pieces)


def parse_new(body: dict[str, Any]) -> NewConversation:
    return parse(NewConversation, body)


def parse_changed(body: dict[str, Any]) -> ChangedConversation:
    return parse(ChangedConversation, body)


def parse_items(body: dict[str, Any]) -> NewItems:
    return parse(NewItems, body)


def _conversations(request: Request) -> Conversations:
    return gateway_of(request).responses.conversations


@router.post("/v1/conversations", openapi_extra=json_body(NewConversation))
async def create_conversation(request: Request, response: Response, key: Caller, owner: Owner) -> dict[str, Any]:
    """Create a conversation. Responses that name it read its items, and add their own."""
    async with hold_object(request, parse_new) as body:
        items = body.items or []
        response.headers.update(ignored_header(items_left_out(items, "items")))
        return await _conversations(request).create(served_items(items), body.metadata or {}, owner)


@router.get("/v1/conversations/{conversation_id}")
async def retrieve_conversation(request: Request, owner: Owner, conversation_id: str) -> dict[str, Any]:
    return await _conversations(request).get(conversation_id, owner)


@router.post("/v1/conversations/{conversation_id}", openapi_extra=json_body(ChangedConversation))
async def update_conversation(request: Request, key: Caller, owner: Owner, conversation_id: str) -> dict[str, Any]:
    """Replace the metadata of a conversation."""
    async with hold_object(request, parse_changed) as body:
        return await _conversations(request).update(conversation_id, body.metadata or {}, owner)


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(request: Request, owner: Owner, conversation_id: str) -> dict[str, Any]:
    """Delete a conversation with its items. Responses that were made in it stay."""
    await _conversations(request).delete(conversation_id, owner)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.post("/v1/conversations/{conversation_id}/items", openapi_extra=json_body(NewItems))
async def create_conversation_items(request: Request, key: Caller, owner: Owner, conversation_id: str) -> Response:
    """Add items to a conversation. Return them as they are kept."""
    async with hold_object(request, parse_items) as body:
        added = await _conversations(request).add(conversation_id, served_items(body.items), owner)
        headers = ignored_header(items_left_out(body.items, "items"))
    return item_page(added, MAX_ITEMS, "asc", None, headers)


@router.get("/v1/conversations/{conversation_id}/items")
async def list_conversation_items(
    request: Request, owner: Owner, conversation_id: str, limit: Limit = 20, order: Order = "desc", after: After = None
) -> Response:
    """List the items of a conversation, page by page."""
    return item_page(await _conversations(request).items(conversation_id, owner), limit, order, after)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_conversation_item(request: Request, owner: Owner, conversation_id: str, item_id: str) -> Response:
    items = await _conversations(request).items(conversation_id, owner)
    found = next((item for item in items if item["id"] == item_id), None)
    if found is None:
        raise no_such_item(item_id)
    return json_response(found)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_conversation_item(
    request: Request, owner: Owner, conversation_id: str, item_id: str
) -> dict[str, Any]:
    """Remove an item from a conversation. Return the conversation."""
    return await _conversations(request).remove(conversation_id, item_id, owner)
