"""The /v1/batches endpoints: create, list, retrieve, cancel and estimate batches.

Translates between HTTP and the batch service. An API key sees only its own batches. A key may create batches only if it
may use the tier in which batches run. Only wrong parameters, windows in which a batch cannot end and too many batches
are refused here: errors in an input file appear later, in the batch's `errors`. What OpenAI's batch object does not
have is in its object `tidegate`.
"""

import hashlib
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, Field

from gateway.identity import ApiKey
from gateway.jobs.batches.completion_window import checked_window
from gateway.jobs.batches.forecast.forecasts import Infeasible
from gateway.jobs.batches.input.size import InputSize
from gateway.jobs.batches.model import Batch, NewBatch
from gateway.jobs.batches.service import BatchService, InputProblem, NotCancellable, TooManyBatches
from gateway.protocol.bodies.options import Metadata
from gateway.protocol.errors import ApiError, invalid_request, invalid_value, retry_after
from gateway.protocol.json_body import Body, parse, read_object
from gateway.protocol.openapi import json_body
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.files import Owner
from gateway.routes.jobs.idempotency import once
from gateway.state import gateway_of

router = APIRouter()

BEST_EFFORT_KEY = "x-tidegate-best-effort"  # of a batch's metadata, for clients that cannot send other fields
TOO_MANY_RETRY_S = 10.0  # seconds after which a key with too many batches may try again
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
]
Window = Annotated[str, AfterValidator(checked_window), Field(examples=["24h", "15m", "7d"])]
Tokens = Annotated[int, Field(ge=0, le=2**53)]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class CreateBatchRequest(Body):
    input_file_id: str
    endpoint: Endpoint
    completion_window: Window
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    best_effort: bool | None = None  # take the batch even if it cannot end within its window

    def to_new_batch(self, owner: str | None) -> NewBatch:
        expiry = self.output_expires_after
        return NewBatch(
            input_file_id=self.input_file_id,
            endpoint=self.endpoint,
            completion_window=self.completion_window,
            owner=owner,
            metadata=self.metadata,
            output_expires_after_s=None if expiry is None else expiry.seconds,
            best_effort=bool(self.best_effort) or (self.metadata or {}).get(BEST_EFFORT_KEY) in ("1", "true"),
        )


class EstimateRequest(Body):
    """The size of an input that is not uploaded: the fields of `gateway.jobs.batches.input.size.InputSize`."""

    endpoint: Endpoint
    completion_window: Window = "24h"
    model: str | None = None
    lines: Annotated[int, Field(ge=1, le=2**53)]
    choices: Tokens | None = None  # None: one a line
    prompt_bytes: Tokens
    distinct_bytes: Tokens | None = None  # None: no prompt begins like another one
    min_output: Tokens = 0
    max_output: Tokens = 0
    unlimited: Tokens | None = None  # None: no line has a maximum of output tokens

    def size(self) -> InputSize:
        choices = self.lines if self.choices is None else self.choices
        return InputSize(
            lines=self.lines,
            choices=choices,
            prompt_bytes=self.prompt_bytes,
            distinct_bytes=self.prompt_bytes if self.distinct_bytes is None else self.distinct_bytes,
            min_output=self.min_output,
            max_output=self.max_output,
            unlimited=choices if self.unlimited is None else self.unlimited,
            model=self.model,
        )


@router.post("/v1/batches", openapi_extra=json_body(CreateBatchRequest))
async def create_batch(request: Request, caller: Caller, owner: Owner) -> Response:
    batches = gateway_of(request).batches
    check_tier(request, caller)
    digest = hashlib.sha256()
    body = await read_object(request, partial(parse, CreateBatchRequest), digest.update)
    gateway_of(request).webhooks.check(body.metadata, caller)

    async def create(new_id: str) -> Response:
        created = await batches.create(body.to_new_batch(owner), new_id)
        if isinstance(created, InputProblem):
            raise invalid_request(created.message, "input_file_id")
        if isinstance(created, Infeasible):
            raise infeasible(created)
        if isinstance(created, TooManyBatches):
            raise too_many(created)
        return JSONResponse(await _described(batches, created))

    return await once(request, owner, digest.hexdigest(), create)


@router.post("/v1/batches/estimate", openapi_extra=json_body(EstimateRequest))
async def estimate_batch(request: Request, caller: Caller, owner: Owner) -> dict[str, Any]:
    """Say what a batch would take, before anything is uploaded."""
    batches = gateway_of(request).batches
    check_tier(request, caller)
    body = await read_object(request, partial(parse, EstimateRequest))
    new = NewBatch("", body.endpoint, owner, body.completion_window)
    return {
        "object": "batch.estimate",
        "completion_window": body.completion_window,
        **await batches.forecasts.preview(new, body.size()),
        "interactive": [
            {"tier": tier.name, "max_slowdown": tier.max_slowdown, **tier.slo.model_dump(exclude_none=True)}
            for tier in gateway_of(request).tiers.by_priority
            if tier.is_interactive
        ],
    }


@router.get("/v1/batches")
async def list_batches(
    request: Request, owner: Owner, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    batches = gateway_of(request).batches
    page = await batches.list(owner=owner, after=after, limit=limit)
    if page is None:
        raise invalid_value("after", "Invalid value for 'after': there is no such batch.")
    described = await batches.forecasts.describe(page.items)
    return page.to_json([batch.to_json() | {"tidegate": e} for batch, e in zip(page.items, described, strict=True)])


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, owner: Owner, batch_id: str) -> dict[str, Any]:
    batches = gateway_of(request).batches
    return await _described(batches, _existing(await batches.retrieve(batch_id, owner=owner), batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, owner: Owner, batch_id: str) -> dict[str, Any]:
    batches = gateway_of(request).batches
    outcome = await batches.cancel(batch_id, owner=owner)
    if isinstance(outcome, NotCancellable):
        message = f"Cannot cancel a batch with status '{outcome.status.value}'."
        raise ApiError(409, message, headers={"x-should-retry": "false"})
    return await _described(batches, _existing(outcome, batch_id))


@router.delete("/v1/batches/{batch_id}")
async def delete_batch(request: Request, owner: Owner, batch_id: str) -> dict[str, Any]:
    """Delete the record of a batch that is over. Its files stay."""
    deleted = await gateway_of(request).batches.delete(batch_id, owner=owner)
    if deleted is None:
        raise _unknown(batch_id)
    if not deleted:
        message = "This batch is not over yet: cancel it (POST /v1/batches/{batch_id}/cancel), or wait for its end."
        raise ApiError(409, message, headers={"x-should-retry": "false"})
    return {"id": batch_id, "object": "batch", "deleted": True}


async def _described(batches: BatchService, batch: Batch) -> dict[str, Any]:
    [extension] = await batches.forecasts.describe([batch])
    return batch.to_json() | {"tidegate": extension}


def infeasible(found: Infeasible) -> ApiError:
    feasible = (
        "No completion_window is long enough at present. Make it smaller"
        if found.earliest_window is None
        else f"The earliest feasible completion_window is '{found.earliest_window}'. Ask for that one or a longer one"
    )
    message = (
        f"This batch cannot be promised to end within {found.window}, beside interactive traffic and what is queued. "
        f'{feasible}, or send "best_effort": true to run it without a promise.'
    )
    return invalid_request(message, "completion_window", "completion_window_infeasible")


def too_many(found: TooManyBatches) -> ApiError:
    message = (
        f"This API key has {found.limit} batches that are not over, and may have no more. Wait until one of them ends, "
        "cancel some (POST /v1/batches/{batch_id}/cancel), or put more requests into one batch."
    )
    return ApiError(429, message, "batches", code="rate_limit_exceeded", headers=retry_after(TOO_MANY_RETRY_S))


def check_tier(request: Request, caller: ApiKey | None) -> None:
    """Refuse a key that may not use the batch tier."""
    tiers = gateway_of(request).tiers
    tier = tiers[tiers.batch_tier]
    if caller is not None and not caller.may_use(tier):
        message = f"This API key may not use the {tier.name} tier, in which batches run."
        raise ApiError(403, message, code="insufficient_permissions")


def _existing(batch: Batch | None, batch_id: str) -> Batch:
    if batch is None:
        raise _unknown(batch_id)
    return batch


def _unknown(batch_id: str) -> ApiError:
    return ApiError(404, f"No batch found with id '{batch_id[:200]}'.", param="id")
