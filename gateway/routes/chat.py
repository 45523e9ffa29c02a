"""POST /v1/chat/completions and POST /v1/completions: answer a conversation, or continue prompts."""

from fastapi import APIRouter, Request, Response

from gateway.identity import ApiKey
from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest
from gateway.protocol.json_body import hold_object
from gateway.protocol.openapi import json_body
from gateway.routes.delivery import send_answer, submit
from gateway.routes.dependencies import Caller
from gateway.state import gateway_of

router = APIRouter(tags=["completions"])


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def create_chat_completion(request: Request, key: Caller) -> Response:
    """Answer a conversation with one JSON object, or with server-sent events if `stream` is true."""
    return await _deliver(request, "/v1/chat/completions", key)


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def create_completion(request: Request, key: Caller) -> Response:
    """Continue one or many prompts. The answer is one JSON object, or server-sent events if `stream` is true."""
    return await _deliver(request, "/v1/completions", key)


async def _deliver(request: Request, path: str, key: ApiKey | None) -> Response:
    """Read a body of the endpoint `path`, submit the request in its tier, and return the response.

    If the request is refused, the function raises `ApiError` before any header is sent.
    """
    endpoint = gateway_of(request).completions.endpoints[path]
    async with hold_object(request, endpoint.parse) as body:
        answer = endpoint.new(body)
        generation = await submit(request, body, key, answer.prepare)
    return await send_answer(request, body, answer.run(generation))
