"""One answer on its way to one HTTP client: as a stream or whole, and cancelled when the client hangs up.

Knows HTTP and the completion service; what the answer says is not its matter.
"""

import structlog
from fastapi import Request, Response

from gateway.completion.openai_objects import encode_json
from gateway.http.disconnect import CLIENT_CLOSED, ClientDisconnected, until_disconnect
from gateway.http.sse import EventStreamResponse
from gateway.identity import ApiKey, demotion_of, resolve_tier
from gateway.protocol.schemas import ChatCompletionRequest, CompletionRequest
from gateway.state import Gateway


async def deliver(
    request: Request, gateway: Gateway, body: ChatCompletionRequest | CompletionRequest, key: ApiKey | None
) -> Response:
    """Resolve the tier, submit, answer. Whatever refuses the request does so before any header is sent."""
    tiers = gateway.tiers
    resolved = resolve_tier(body.service_tier, key, tiers)
    structlog.contextvars.bind_contextvars(tier=resolved.tier.name)
    job = await gateway.completions.prepare(
        body,
        tier=resolved.tier,
        answer=resolved.answer,
        request_id=request.state.request_id,
        owner=key.name if key else None,
        demotion=demotion_of(resolved.tier, key, tiers),
    )
    response = await gateway.completions.submit(job)
    structlog.contextvars.bind_contextvars(tier=response.tier.name)

    def hung_up() -> None:
        gateway.metrics.count_disconnect(response.tier.name)
        request.state.hung_up = True  # for gateway/http/middleware.py

    if body.stream:
        return EventStreamResponse(response.stream, hung_up)
    try:
        async with until_disconnect(request.receive):
            answer = await response.respond()
    except ClientDisconnected:
        hung_up()
        return Response(status_code=CLIENT_CLOSED)
    return Response(encode_json(answer), media_type="application/json")
