"""POST /v1/completions."""

from functools import partial

from fastapi import APIRouter, Request, Response

from gateway.authentication import Caller
from gateway.body import read_object
from gateway.delivery import deliver
from gateway.openapi import json_body
from gateway.schemas import CompletionRequest, parse_generation
from gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest), tags=["completions"])
async def create_completion(request: Request, key: Caller) -> Response:
    """Continuations of one or many prompts, whole or (`stream: true`) as server-sent events."""
    body = await read_object(request, partial(parse_generation, CompletionRequest))
    return await deliver(request, gateway_of(request), body, key)
