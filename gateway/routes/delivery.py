"""Answer one completion request over HTTP, as a stream or as one object.

If the client hangs up, the generation is cancelled.

Knows HTTP and the completion service; does not know the format of answers.
"""

from functools import partial
from typing import Any, Protocol

import structlog
from fastapi import Request, Response

from gateway.completion.answer_cache import HEADER, parse_ttl
from gateway.completion.generation import Generation, PreparedRequest
from gateway.completion.openai_objects import encode_json
from gateway.completion.service import AnyRequest
from gateway.http.disconnect import CLIENT_CLOSED, ClientDisconnected, until_disconnect
from gateway.http.sse import EventStreamResponse, Write
from gateway.identity import ApiKey, ResolvedTier, demotion_of, patient_service_tier, resolve_tier
from gateway.protocol.json_body import hold_object
from gateway.protocol.schemas import ChatCompletionRequest, CompletionRequest, parse_generation
from gateway.protocol.tier_synonyms import TTFT_HEADER, wished_service_tier
from gateway.protocol.unknown_names import IGNORED_HEADER, header_value
from gateway.state import gateway_of
from scheduler.config import Tier

RECEIPT_HEADER = "x-tidegate-receipt"  # a request with it gets an answer with a receipt


async def deliver(
    request: Request, kind: type[ChatCompletionRequest] | type[CompletionRequest], key: ApiKey | None
) -> Response:
    """Read a body with the schema `kind`, submit the request in its tier, and return the response.

    If the request is refused, the function raises `ApiError` before any header is sent.
    """
    body: AnyRequest
    async with hold_object(request, partial(parse_generation, kind)) as body:
        stream = await submit(request, body, key, partial(gateway_of(request).completions.prepare, body))
    return await send_answer(request, body, stream)


class Asked(Protocol):
    """The part of a body that matters to its delivery."""

    @property
    def service_tier(self) -> str | None: ...

    @property
    def priority(self) -> int | None: ...

    @property
    def stream(self) -> bool | None: ...

    @property
    def ignored_names(self) -> tuple[str, ...]: ...


class Prepare(Protocol):
    """A function that prepares a request for its tier, as `CompletionService.prepare` does."""

    async def __call__(
        self, *, tier: Tier, service_tier: str, request_id: str, owner: str | None, demotion: ResolvedTier | None
    ) -> PreparedRequest: ...


class Deliverable(Protocol):
    """An answer that is being generated. Only one of its methods is called, and only once."""

    @property
    def tier(self) -> Tier: ...

    async def respond(self) -> dict[str, Any]: ...

    async def stream(self, write: Write) -> None: ...


async def send_answer(request: Request, body: Asked, generation: Deliverable) -> Response:
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


def headers_of(body: Asked) -> dict[str, str] | None:
    """Return the headers of an answer to `body`."""
    return {IGNORED_HEADER: header_value(body.ignored_names)} if body.ignored_names else None


async def submit(request: Request, body: Asked, key: ApiKey | None, prepare: Prepare) -> Generation:
    """Prepare the request in the tier that it asks for, and submit it. Raises `ApiError` if it is refused."""
    gateway = gateway_of(request)
    cache_ttl_s = parse_ttl(request.headers.get(HEADER))
    tiers = gateway.tiers
    resolved = resolve_tier(_wished_tier(request, body, key), key, tiers)
    structlog.contextvars.bind_contextvars(tier=resolved.tier.name)
    if request.headers.get(RECEIPT_HEADER, "0").lower() not in ("0", "false", ""):
        prepare = _with_receipt(prepare, _wished_tier(request, body, key) or "auto")
    prepared = await prepare(
        tier=resolved.tier,
        service_tier=resolved.service_tier,
        request_id=request.state.request_id,
        owner=key.name if key else None,
        demotion=demotion_of(resolved.tier, key, tiers),
    )
    stream = await gateway.completions.submit(
        prepared, cache_ttl_s, patient=patient_service_tier(resolved.tier, key, tiers)
    )
    request.state.headers = stream.headers
    structlog.contextvars.bind_contextvars(tier=stream.tier.name)  # a demotion may have changed it
    return stream


def _with_receipt(prepare: Prepare, requested: str) -> Prepare:
    """Return `prepare` for answers with a receipt. `requested` is the `service_tier` that the receipt names."""

    async def prepare_with_receipt(**how: Any) -> PreparedRequest:
        return (await prepare(**how)).with_receipt(requested)

    return prepare_with_receipt


def _wished_tier(request: Request, body: Asked, key: ApiKey | None) -> str | None:
    slo_ttft_ms = request.headers.get(TTFT_HEADER)
    if not body.priority and slo_ttft_ms is None:
        return body.service_tier
    tiers = gateway_of(request).tiers
    usual = resolve_tier(None, key, tiers).tier
    return wished_service_tier(body.service_tier, body.priority, slo_ttft_ms, usual, tiers)
