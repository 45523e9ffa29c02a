"""The /v1/batches endpoints: create, list, retrieve and cancel batches.

Translates between HTTP and the batch service. An API key sees only its own batches. A key may create batches only if it
may use the tier in which batches run. Only wrong parameters are refused here: errors in an input file appear later, in
the batch's `errors`.
"""

import hashlib
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from gateway.batches.model import Batch, NewBatch
from gateway.batches.service import BatchService, InputProblem, NotCancellable
from gateway.identity import ApiKey
from gateway.protocol.errors import ApiError, invalid_request, invalid_value
from gateway.protocol.json_body import Body, parse, read_object
from gateway.protocol.schemas import Metadata
from gateway.routes.dependencies import Caller
from gateway.routes.files import Owner, refusing_full_disk
from gateway.routes.idempotency import once
from gateway.state import gateway_of

router = APIRouter()


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class CreateBatchRequest(Body):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    def to_new_batch(self, owner: str | None) -> NewBatch:
        expiry = self.output_expires_after
        return NewBatch(
            input_file_id=self.input_file_id,
            endpoint=self.endpoint,
            completion_window=self.completion_window,
            owner=owner,
            metadata=self.metadata,
            output_expires_after_s=None if expiry is None else expiry.seconds,
        )


@router.post("/v1/batches")
async def create_batch(request: Request, caller: Caller, owner: Owner) -> Response:
    batches = batches_of(request)
    _check_tier(request, caller)
    digest = hashlib.sha256()
    body = await read_object(request, partial(parse, CreateBatchRequest), digest.update)

    async def create(new_id: str) -> Response:
        with refusing_full_disk():
            created = await batches.create(body.to_new_batch(owner), new_id)
        if isinstance(created, InputProblem):
            raise invalid_request(created.message, "input_file_id")
        return JSONResponse(created.to_json())

    return await once(request, owner, digest.hexdigest(), create)


@router.get("/v1/batches")
async def list_batches(
    request: Request, owner: Owner, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    page = await batches_of(request).list(owner=owner, after=after, limit=limit)
    if page is None:
        raise invalid_value("after", "Invalid value for 'after': there is no such batch.")
    return page.to_json([batch.to_json() for batch in page.items])


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, owner: Owner, batch_id: str) -> dict[str, Any]:
    return _existing(await batches_of(request).retrieve(batch_id, owner=owner), batch_id).to_json()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, owner: Owner, batch_id: str) -> dict[str, Any]:
    outcome = await batches_of(request).cancel(batch_id, owner=owner)
    if isinstance(outcome, NotCancellable):
        message = f"Cannot cancel a batch with status '{outcome.status.value}'."
        raise ApiError(409, message, headers={"x-should-retry": "false"})
    return _existing(outcome, batch_id).to_json()


def batches_of(request: Request) -> BatchService:
    batches = gateway_of(request).batches
    if batches is None:
        raise ApiError(404, "This server runs no batches.")
    return batches


def _check_tier(request: Request, caller: ApiKey | None) -> None:
    """Refuse a key that may not use the batch tier."""
    tiers = gateway_of(request).tiers
    tier = tiers[tiers.batch_tier]
    if caller is not None and not caller.may_use(tier):
        message = f"This API key may not use the {tier.name} tier, in which batches run."
        raise ApiError(403, message, code="insufficient_permissions")


def _existing(batch: Batch | None, batch_id: str) -> Batch:
    if batch is None:
        raise ApiError(404, f"No batch found with id '{batch_id[:200]}'.", param="id")
    return batch
