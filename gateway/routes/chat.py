"""POST /v1/chat/completions and POST /v1/completions: answer a conversation, or continue prompts."""

from fastapi import APIRouter, Request, Response

from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest
from gateway.protocol.openapi import json_body
from gateway.routes.delivery import deliver
from gateway.routes.dependencies import Caller

router = APIRouter(tags=["completions"])


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def create_chat_completion(request: Request, key: Caller) -> Response:
    """Answer a conversation with one JSON object, or with server-sent events if `stream` is true."""
    return await deliver(request, "/v1/chat/completions", key)


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def create_completion(request: Request, key: Caller) -> Response:
    """Continue one or many prompts. The answer is one JSON object, or server-sent events if `stream` is true."""
    return await deliver(request, "/v1/completions", key)
