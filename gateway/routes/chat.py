"""POST /v1/chat/completions and POST /v1/completions: text for a conversation, or behind a prompt."""

from functools import partial

from fastapi import APIRouter, Request, Response

from gateway.protocol.json_body import read_object
from gateway.protocol.openapi import json_body
from gateway.protocol.schemas import ChatCompletionRequest, CompletionRequest, parse_generation
from gateway.routes.delivery import deliver
from gateway.routes.dependencies import Caller
from gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest), tags=["completions"])
async def create_chat_completion(request: Request, key: Caller) -> Response:
    """An answer to a conversation, whole or (`stream: true`) as server-sent events."""
    body = await read_object(request, partial(parse_generation, ChatCompletionRequest))
    return await deliver(request, gateway_of(request), body, key)


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest), tags=["completions"])
async def create_completion(request: Request, key: Caller) -> Response:
    """Continuations of one or many prompts, whole or (`stream: true`) as server-sent events."""
    body = await read_object(request, partial(parse_generation, CompletionRequest))
    return await deliver(request, gateway_of(request), body, key)
