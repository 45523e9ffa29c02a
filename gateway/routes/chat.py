"""POST /v1/chat/completions."""

from functools import partial

from fastapi import APIRouter, Request, Response

from gateway.authentication import Caller
from gateway.body import read_object
from gateway.delivery import deliver
from gateway.openapi import json_body
from gateway.schemas import ChatCompletionRequest, parse_generation
from gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest), tags=["completions"])
async def create_chat_completion(request: Request, key: Caller) -> Response:
    """An answer to a conversation, whole or (`stream: true`) as server-sent events."""
    body = await read_object(request, partial(parse_generation, ChatCompletionRequest))
    return await deliver(request, gateway_of(request), body, key)
