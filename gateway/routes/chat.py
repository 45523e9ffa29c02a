"""POST /v1/chat/completions and POST /v1/completions: answer a conversation, or continue prompts.

A request is answered as a stream or as one object. If the client hangs up, the generation is cancelled. Knows HTTP and
the completion service; does not know the format of answers.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import structlog
from fastapi import APIRouter, Request, Response

from gateway.http.disconnect import CLIENT_CLOSED, ClientDisconnected, until_disconnect
from gateway.http.sse import EventStreamResponse
from gateway.identity import ApiKey
from gateway.models import ServedModel
from gateway.protocol.bodies.options import GenerationBody
from gateway.protocol.bodies.schemas import ChatCompletionRequest, CompletionRequest
from gateway.protocol.bodies.unsupported import ignored_header
from gateway.protocol.json_body import hold_object
from gateway.protocol.openapi import json_body
from gateway.requests.answers.chunks import encode_json
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.service import Deliverable
from gateway.requests.prepare.placement import Placement, place
from gateway.requests.prepare.prepared import PreparedRequest
from gateway.requests.prepare.routing import Routed, Sent, routed, served_model
from gateway.routes.dependencies import Caller
from gateway.state import gateway_of
from scheduler.routing import Routing

T = TypeVar("T")
B = TypeVar("B", bound="NamesModel")
Prepare = Callable[[Placement], Awaitable[PreparedRequest]]

MODEL_HEADER = "x-tidegate-model"  # of an answer by another model than the request named: a split's or a fallback

router = APIRouter(tags=["completions"])


class NamesModel(Protocol):
    """A body that names a model."""

    @property
    def model(self) -> Any: ...

    def model_copy(self, *, update: dict[str, Any]) -> Self: ...


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def create_chat_completion(request: Request, key: Caller) -> Response:
    """Answer a conversation with one JSON object, or with server-sent events if `stream` is true."""
    return await deliver(request, "/v1/chat/completions", key)


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def create_completion(request: Request, key: Caller) -> Response:
    """Continue one or many prompts. The answer is one JSON object, or server-sent events if `stream` is true."""
    return await deliver(request, "/v1/completions", key)


async def deliver(request: Request, path: str, key: ApiKey | None) -> Response:
    """Read a body of the endpoint `path`, submit the request in its tier, and return the response.

    If the request is refused, the function raises `ApiError` before any header is sent.
    """
    endpoint = gateway_of(request).models.main.completions.endpoints[path]
    async with hold_object(request, parser_for(request, endpoint.parse, key)) as body:
        served, body = choose_model(request, body, key)
        answer = served.completions.endpoints[path].new(body)
        generation = await submit(request, served, body, key, answer.prepare)
    return await send_answer(request, body, answer.run(generation))


def parser_for(
    request: Request, parse: Callable[[dict[str, Any]], T], key: ApiKey | None
) -> Callable[[dict[str, Any]], T]:
    """Return `parse` for a body that need not name the model: then it is the main one.

    The rule that chooses the tier of the body is kept in the result, for `submit`. What is returned is picklable,
    because large bodies are parsed in another process.
    """
    gateway = gateway_of(request)
    routing = gateway.models.main.tiers.routing
    headers = dict(request.headers) if routing.active else {}
    sent = Sent(request.scope["path"], headers, None if key is None else key.name, {})
    return partial(_parse, gateway.models.names, routing, sent, parse)


def _parse(
    names: tuple[str, ...], routing: Routing, sent: Sent, parse: Callable[[dict[str, Any]], T], body: dict[str, Any]
) -> T:
    named = body.get("model")
    model = names[0] if named in (None, "") else named
    if isinstance(model, str):
        model = served_model(routing, model, names)
    parsed = parse(body if model == named else {**body, "model": model})
    if routing.active and isinstance(parsed, GenerationBody):
        parsed._routed = routed(routing, replace(sent, body=body))
    return parsed


def choose_model(request: Request, body: B, key: ApiKey | None) -> tuple[ServedModel, B]:
    """Return the model that answers `body`, and the body with its name. A header of the answer says who answers."""
    gateway = gateway_of(request)
    asked = str(body.model)
    choice = gateway.models.choose(asked, _sender_of(body, key))
    if choice.why:
        gateway.metrics.count_choice(asked, choice.served.name, choice.why)
        request.state.headers = {MODEL_HEADER: choice.served.name}
        body = body.model_copy(update={"model": choice.name})
    structlog.contextvars.bind_contextvars(model=choice.served.name)
    return choice.served, body


def _sender_of(body: NamesModel, key: ApiKey | None) -> str | None:
    user = getattr(body, "user", None) or getattr(body, "safety_identifier", None)
    return f"user {user}" if user else None if key is None else f"key {key.name}"


async def send_answer(request: Request, body: GenerationBody, generation: Deliverable) -> Response:
    """Return the response that sends an answer as a stream or as one object."""

    def hung_up() -> None:
        gateway_of(request).metrics.client_disconnects.labels(generation.tier.name).inc()
        request.state.hung_up = True  # RequestContext in gateway/http/middleware.py reads this

    headers = headers_of(body)
    if body.stream:
        return EventStreamResponse(generation.stream, hung_up, headers=headers)
    try:
        async with until_disconnect(request.receive):
            answer = await generation.respond()
    except ClientDisconnected:
        hung_up()
        return Response(status_code=CLIENT_CLOSED)
    return json_response(answer, headers)


def json_response(value: dict[str, Any], headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """Return a response with `value`, which may be large."""
    return Response(encode_json(value), status, headers, "application/json")


def headers_of(body: GenerationBody) -> dict[str, str] | None:
    """Return the headers of an answer to `body`."""
    return ignored_header(body.ignored_names) or None


async def submit(
    request: Request, served: ServedModel, body: GenerationBody, key: ApiKey | None, prepare: Prepare
) -> Generation:
    """Prepare the request in the tier of its model that it asks for, and submit it.

    Raises `ApiError` if it is refused.
    """
    gateway = gateway_of(request)
    rule: Routed | None = body.routed
    placement = place(body, request.headers, key, served.tiers, request.state.request_id, rule)
    structlog.contextvars.bind_contextvars(tier=placement.tier.name)
    if placement.rule is not None:
        structlog.contextvars.bind_contextvars(rule=placement.rule)
    generation = await served.completions.submit(await prepare(placement))
    if placement.rule is not None:
        gateway.metrics.requests_routed.labels(placement.rule).inc()
    request.state.headers = {**getattr(request.state, "headers", {}), **generation.headers}
    structlog.contextvars.bind_contextvars(tier=generation.tier.name)  # a demotion may have changed it
    return generation
