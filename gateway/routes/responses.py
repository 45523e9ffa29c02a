"""The /v1/responses endpoints: create, retrieve, follow, cancel and delete responses, and list their input.

Translates between HTTP and the response service. An API key sees only its own responses.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from gateway.dialects.responses.items import Item
from gateway.dialects.responses.request import ResponseRequest, parse_compaction, parse_response_request
from gateway.http.sse import EventStreamResponse
from gateway.identity import ApiKey, resolve_tier
from gateway.jobs.responses.creation import NewResponse
from gateway.jobs.responses.service import ResponseService
from gateway.jobs.responses.store import StoredResponse
from gateway.models import ServedModel
from gateway.protocol.errors import ApiError, invalid_request, invalid_value
from gateway.protocol.json_body import hold_object
from gateway.protocol.openapi import json_body
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.waiting import WaitingGeneration
from gateway.requests.prepare.placement import Placement
from gateway.requests.prepare.prepared import PreparedRequest
from gateway.routes.chat import choose_model, headers_of, json_response, parser_for, send_answer, submit
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.files import Owner
from gateway.routes.jobs.idempotency import idempotency_key, once
from gateway.state import gateway_of

router = APIRouter(tags=["responses"])

MAY_WAIT_HEADER = "x-tidegate-may-wait"  # a response with it becomes one in the background where it would be refused
EXPECTED_HEADER = "x-tidegate-expected-s"  # seconds until a refused response is expected to be taken

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
After = str | None


@router.post("/v1/responses", openapi_extra=json_body(ResponseRequest))
async def create_response(request: Request, key: Caller) -> Response:
    """Answer a conversation with one response object, or with server-sent events if `stream` is true.

    With `background`, the response object is sent at once, and the response is generated afterwards.
    """
    async with AsyncExitStack() as body_held:
        return await _answer(request, key, body_held)


async def _answer(request: Request, key: ApiKey | None, body_held: AsyncExitStack) -> Response:
    digest = hashlib.sha256()
    parse = parser_for(request, parse_response_request, key)
    body = await body_held.enter_async_context(hold_object(request, parse, digest.update))
    served, body = choose_model(request, body, key)
    service, owner = gateway_of(request).responses, key.name if key else None
    if body.stream and not body.background:
        if idempotency_key(request) is not None:
            message = "A stream cannot be repeated, so it has no Idempotency-Key, unless 'background' is true as well."
            raise invalid_request(message, "stream", "unsupported_parameter")
        return await _create(request, served, body, key, service.new(served.completions, body), body_held)

    if body.stream:
        service.check_followers(owner)  # before there is a response whose id would be lost

    async def create(_: str) -> Response:
        new = service.new(served.completions, body)
        if body.background:
            return await _create_in_background(request, served, body, key, service, new)
        try:
            return await _create(request, served, body, key, new, body_held)
        except ApiError as refusal:
            if not _may_wait(request, body) or new.waiting(refusal) is None:
                raise
        later = body.model_copy(update={"background": True})
        new = service.new(served.completions, later)
        return await _create_in_background(request, served, later, key, service, new)

    response = await once(request, owner, digest.hexdigest(), create)
    if not body.stream:
        return response
    response_id = msgspec.json.decode(response.body)["id"]
    return _following(request, service, response_id, owner, after=-1, headers=headers_of(body))


async def _create(
    request: Request,
    served: ServedModel,
    body: ResponseRequest,
    key: ApiKey | None,
    new: NewResponse,
    body_held: AsyncExitStack,
) -> Response:
    generation = await submit(request, served, body, key, new.prepare)
    await body_held.aclose()
    return await send_answer(request, body, new.run(generation))


async def _create_in_background(
    request: Request,
    served: ServedModel,
    body: ResponseRequest,
    key: ApiKey | None,
    service: ResponseService,
    new: NewResponse,
) -> Response:
    gateway_of(request).webhooks.check(body.metadata, key)

    async def prepare(placement: Placement) -> PreparedRequest:
        prepared = await new.prepare(placement)
        await service.enqueue(new)
        return prepared

    headers = headers_of(body) or {}
    try:
        generation: Generation | WaitingGeneration = await submit(request, served, body, key, prepare)
    except BaseException as refusal:
        waiting = new.waiting(refusal) if isinstance(refusal, ApiError) else None
        if waiting is None:
            await new.withdraw()
            raise
        generation, headers[EXPECTED_HEADER] = waiting, str(math.ceil(waiting.expected_s))
    return json_response(service.launch(new, generation), headers or None)


def _may_wait(request: Request, body: ResponseRequest) -> bool:
    """Return whether the caller takes a background response where a request would be refused."""
    return request.headers.get(MAY_WAIT_HEADER, "0").lower() not in ("0", "false", "") and body.store is not False


@router.post("/v1/responses/input_tokens", openapi_extra=json_body(ResponseRequest))
async def count_input_tokens(request: Request, response: Response, key: Caller, owner: Owner) -> dict[str, Any]:
    """Count the tokens of the prompt that a response would have. Nothing is generated."""
    async with hold_object(request, parser_for(request, parse_response_request, key)) as body:
        served, body = choose_model(request, body, key)
        tier = resolve_tier(body.service_tier, key, served.tiers).tier
        new = gateway_of(request).responses.new(served.completions, body)
        prepared = await new.prepare(Placement(tier, "auto", request.state.request_id, owner))
        response.headers.update(headers_of(body) or {})
    return {"object": "response.input_tokens", "input_tokens": len(prepared.requests[0].prompt_token_ids)}


@router.post("/v1/responses/compact", openapi_extra=json_body(ResponseRequest))
async def compact_response(request: Request, key: Caller) -> Response:
    """Return a conversation as its user's messages and a summary of all the rest, for the input of later requests."""
    parse = partial(_naming_a_model, parser_for(request, parse_compaction, key))
    async with hold_object(request, parse) as body:
        served, body = choose_model(request, body, key)
        new = gateway_of(request).responses.new_compaction(served.completions, body)
        generation = await submit(request, served, body, key, new.prepare)
    return await send_answer(request, body, new.run(generation))


def _naming_a_model(parse: Callable[[dict[str, Any]], ResponseRequest], body: dict[str, Any]) -> ResponseRequest:
    """Return what `parse` makes of a body with a model. Only a compaction needs one: Open Responses asks for a 400."""
    if body.get("model") in (None, ""):
        raise invalid_request("Missing required parameter: 'model'.", "model", "missing_required_parameter")
    return parse(body)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    request: Request,
    owner: Owner,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0)] | None = None,
) -> Response:
    """Return a stored response, or with `stream` the events of a background response."""
    service = gateway_of(request).responses
    found = _existing(await service.get(response_id, owner), response_id)
    if not stream:
        if starting_after is not None:
            raise invalid_value("starting_after", "The 'starting_after' parameter needs 'stream=true'.")
        return json_response(found.response)
    if not found.response["background"]:
        message = "Only responses that were created with 'background' can be streamed again."
        raise invalid_request(message, "stream", "unsupported_parameter")
    return _following(request, service, response_id, owner, after=-1 if starting_after is None else starting_after)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, owner: Owner, response_id: str) -> dict[str, Any]:
    """Delete a stored response. Responses that continue its conversation lose what came before them."""
    if not await gateway_of(request).responses.delete(response_id, owner):
        _existing(None, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, owner: Owner, response_id: str) -> Response:
    """Cancel a response that is generated in the background. A response that has ended stays as it is."""
    service = gateway_of(request).responses
    found = _existing(await service.get(response_id, owner), response_id)
    if not found.response["background"]:
        message = "Only responses that were created with 'background' can be cancelled."
        raise invalid_request(message, "response_id")
    return json_response(_existing(await service.cancel(found, owner), response_id).response)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    owner: Owner,
    response_id: str,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> Response:
    """List the input items of a stored response, page by page. Earlier turns of the conversation are not listed."""
    found = _existing(await gateway_of(request).responses.get(response_id, owner), response_id)
    return item_page(found.input, limit, order, after)


def item_page(
    items: list[Item],
    limit: int,
    order: Literal["asc", "desc"],
    after: str | None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a page of `items`, which are in the order of the conversation, behind the item `after`."""
    items = items[::-1] if order == "desc" else items
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid_value("after", "Invalid value for 'after': there is no such item.")
    begin = 0 if after is None else ids.index(after) + 1
    data, left = items[begin : begin + limit], items[begin + limit :]
    first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")  # strings, as the openai client expects
    page = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": bool(left)}
    return json_response(page, headers)


def _existing(found: StoredResponse | None, response_id: str) -> StoredResponse:
    if found is None:
        raise ApiError(404, f"Response with id '{response_id[:200]}' not found.", param="response_id")
    return found


def _following(
    request: Request,
    service: ResponseService,
    response_id: str,
    owner: str | None,
    after: int,
    headers: dict[str, str] | None = None,
) -> EventStreamResponse:
    """Return the events of a background response. If the client hangs up, the response is generated nevertheless."""

    def hung_up() -> None:
        request.state.hung_up = True  # RequestContext in gateway/http/middleware.py reads this

    return EventStreamResponse(partial(service.follow, response_id, owner, after), hung_up, headers=headers)
