"""Answer one request over HTTP, as a stream or as one object.

If the client hangs up, the generation is cancelled.

Knows HTTP and the completion service; does not know the format of answers.
"""

from collections.abc import Awaitable, Callable

import structlog
from fastapi import Request, Response

from gateway.http.disconnect import CLIENT_CLOSED, ClientDisconnected, until_disconnect
from gateway.http.sse import EventStreamResponse
from gateway.identity import ApiKey
from gateway.protocol.bodies.options import GenerationBody
from gateway.protocol.bodies.unknown_names import IGNORED_HEADER, header_value
from gateway.requests.answers.chunks import encode_json
from gateway.requests.generate.generation import Generation
from gateway.requests.generate.service import Deliverable
from gateway.requests.prepare.placement import Placement, place
from gateway.requests.prepare.prepared import PreparedRequest
from gateway.state import gateway_of

Prepare = Callable[[Placement], Awaitable[PreparedRequest]]


async def send_answer(request: Request, body: GenerationBody, generation: Deliverable) -> Response:
    """Return the response that sends an answer as a stream or as one object."""

    def hung_up() -> None:
        gateway_of(request).metrics.count_disconnect(generation.tier.name)
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
    return Response(encode_json(answer), headers=headers, media_type="application/json")


def headers_of(body: GenerationBody) -> dict[str, str] | None:
    """Return the headers of an answer to `body`."""
    return {IGNORED_HEADER: header_value(body.ignored_names)} if body.ignored_names else None


async def submit(request: Request, body: GenerationBody, key: ApiKey | None, prepare: Prepare) -> Generation:
    """Prepare the request in the tier that it asks for, and submit it. Raises `ApiError` if it is refused."""
    gateway = gateway_of(request)
    placement = place(body, request.headers, key, gateway.tiers, request.state.request_id)
    structlog.contextvars.bind_contextvars(tier=placement.tier.name)
    generation = await gateway.completions.submit(await prepare(placement))
    request.state.headers = generation.headers
    structlog.contextvars.bind_contextvars(tier=generation.tier.name)  # a demotion may have changed it
    return generation
