"""Answer one completion request over HTTP, as a stream or as one object.

If the client hangs up, the generation is cancelled.

Knows HTTP and the completion service; does not know the format of answers.
"""

from functools import partial

import structlog
from fastapi import Request, Response

from gateway.completion.openai_objects import encode_json
from gateway.completion.response import ResponseStream
from gateway.completion.service import AnyRequest
from gateway.http.disconnect import CLIENT_CLOSED, ClientDisconnected, until_disconnect
from gateway.http.sse import EventStreamResponse
from gateway.identity import ApiKey, demotion_of, patient_service_tier, resolve_tier
from gateway.protocol.json_body import read_object
from gateway.protocol.schemas import ChatCompletionRequest, CompletionRequest, parse_generation
from gateway.protocol.tier_synonyms import TTFT_HEADER, wished_service_tier
from gateway.protocol.unknown_names import IGNORED_HEADER, header_value
from gateway.state import gateway_of

RECEIPT_HEADER = "x-tidegate-receipt"  # a request with it gets an answer with a receipt


async def deliver(
    request: Request, kind: type[ChatCompletionRequest] | type[CompletionRequest], key: ApiKey | None
) -> Response:
    """Read a body with the schema `kind`, submit the request in its tier, and return the response.

    If the request is refused, the function raises `ApiError` before any header is sent.
    """
    body: AnyRequest = await read_object(request, partial(parse_generation, kind))
    stream = await _submit(request, body, key)

    def hung_up() -> None:
        gateway_of(request).metrics.count_disconnect(stream.tier.name)
        request.state.hung_up = True  # RequestContext in gateway/http/middleware.py reads this

    headers = {IGNORED_HEADER: header_value(body.ignored_names)} if body.ignored_names else None
    if body.stream:
        return EventStreamResponse(stream.stream, hung_up, headers=headers)
    try:
        async with until_disconnect(request.receive):
            answer = await stream.respond()
    except ClientDisconnected:
        hung_up()
        return Response(status_code=CLIENT_CLOSED)
    return Response(encode_json(answer), headers=headers, media_type="application/json")


async def _submit(request: Request, body: AnyRequest, key: ApiKey | None) -> ResponseStream:
    gateway = gateway_of(request)
    tiers = gateway.tiers
    service_tier, slo_ttft_ms = body.service_tier, request.headers.get(TTFT_HEADER)
    if body.priority or slo_ttft_ms is not None:
        usual = resolve_tier(None, key, tiers).tier
        service_tier = wished_service_tier(service_tier, body.priority, slo_ttft_ms, usual, tiers)
    resolved = resolve_tier(service_tier, key, tiers)
    structlog.contextvars.bind_contextvars(tier=resolved.tier.name)
    prepared = await gateway.completions.prepare(
        body,
        tier=resolved.tier,
        service_tier=resolved.service_tier,
        request_id=request.state.request_id,
        owner=key.name if key else None,
        demotion=demotion_of(resolved.tier, key, tiers),
    )
    if request.headers.get(RECEIPT_HEADER, "0").lower() not in ("0", "false", ""):
        prepared = prepared.with_receipt(service_tier or "auto")
    stream = await gateway.completions.submit(prepared, patient_service_tier(resolved.tier, key, tiers))
    structlog.contextvars.bind_contextvars(tier=stream.tier.name)  # a demotion may have changed it
    return stream
