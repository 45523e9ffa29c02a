"""POST /v1/messages and POST /v1/messages/count_tokens: Anthropic's Messages API.

A message is answered as a chat (gateway/dialects/messages/), by the same service and in the same tiers.
"""

from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.dialects.messages.chat import chat_to_count
from gateway.dialects.messages.endpoint import MESSAGES, count_tokens
from gateway.dialects.messages.request import MessagesRequest
from gateway.identity import resolve_tier
from gateway.protocol.json_body import hold_object
from gateway.protocol.openapi import json_body
from gateway.routes.chat import choose_model, deliver, headers_of, parser_for
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.files import Owner

router = APIRouter(tags=["messages"])


@router.post(MESSAGES, openapi_extra=json_body(MessagesRequest))
async def create_message(request: Request, key: Caller) -> Response:
    """Answer a conversation with one message, or with server-sent events if `stream` is true."""
    return await deliver(request, MESSAGES, key)


@router.post(f"{MESSAGES}/count_tokens", openapi_extra=json_body(MessagesRequest))
async def count_message_tokens(request: Request, response: Response, key: Caller, owner: Owner) -> dict[str, Any]:
    """Count the tokens of the prompt that a message would have. Nothing is generated."""
    async with hold_object(request, parser_for(request, chat_to_count, key)) as chat:
        served, chat = choose_model(request, chat, key)
        tier = resolve_tier(None, key, served.tiers).tier
        response.headers.update(headers_of(chat) or {})
        return {"input_tokens": await count_tokens(served.completions, chat, tier, owner)}
