"""The /v1/messages/batches endpoints: create, list, retrieve, cancel and delete batches of messages; their results.

Translates between Anthropic's Message Batches API and the batch service. These batches are also batches of /v1/batches,
where their progress is told before they have ended.
"""

import hashlib
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from gateway.dialects.messages.endpoint import MESSAGES
from gateway.fairness import UnderWay
from gateway.http.download import Download
from gateway.jobs.batches import message_batches
from gateway.jobs.batches.forecast.forecasts import Infeasible
from gateway.jobs.batches.message_batches import CreateMessageBatch, create_message_batch, message_batch
from gateway.jobs.batches.model import Batch
from gateway.jobs.batches.service import InputProblem, NotCancellable, TooManyBatches
from gateway.protocol.errors import (
    ApiError,
    invalid_request,
    invalid_value,
    retry_after,
    too_many_downloads,
    unsupported_parameter,
)
from gateway.protocol.json_body import read_object
from gateway.protocol.openapi import json_body
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.batches import check_tier, infeasible, too_many
from gateway.routes.jobs.files import Owner, quota_bytes_of
from gateway.routes.jobs.idempotency import once
from gateway.state import gateway_of

router = APIRouter(tags=["messages"])

BATCHES = f"{MESSAGES}/batches"
BATCH = BATCHES + "/{message_batch_id}"
CLEARED_UP_S = 0.5  # seconds after which a batch that has ended can be deleted; clients try again by themselves


@router.post(BATCHES, openapi_extra=json_body(CreateMessageBatch))
async def create_messages_batch(request: Request, caller: Caller, owner: Owner) -> Response:
    """Create a batch of requests. A request that breaks the rules of batches is refused here, with its place."""
    gateway = gateway_of(request)
    check_tier(request, caller)
    digest = hashlib.sha256()
    interpret = partial(message_batches.message_batch_input, gateway.batches.rules(MESSAGES))
    new = await read_object(request, interpret, digest.update)
    quota_bytes = quota_bytes_of(request, caller)

    async def create(new_id: str) -> Response:
        created = await create_message_batch(gateway.batches, gateway.files, new, owner, new_id, quota_bytes)
        if isinstance(created, InputProblem):
            raise invalid_request(created.message, "requests")
        if isinstance(created, Infeasible):
            raise infeasible(created)
        if isinstance(created, TooManyBatches):
            raise too_many(created)
        return JSONResponse(_object(request, created))

    return await once(request, owner, digest.hexdigest(), create)


@router.get(BATCHES)
async def list_messages_batches(
    request: Request,
    owner: Owner,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """List batches of messages, newest first."""
    if before_id is not None:
        raise unsupported_parameter("before_id")
    batches, after, found, has_more = gateway_of(request).batches, after_id, list[Batch](), True
    while has_more and len(found) < limit:  # the other batches of the caller lie between them
        page = await batches.list(owner=owner, after=after, limit=limit - len(found))
        if page is None:
            raise invalid_value("after_id", "Invalid value for 'after_id': there is no such batch.")
        found += [batch for batch in page.items if batch.endpoint == MESSAGES]
        has_more, after = page.has_more, page.items[-1].id if page.items else after
    ids = [batch.id for batch in found]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"data": [_object(request, batch) for batch in found], "has_more": has_more, **ends}


@router.get(BATCH)
async def retrieve_messages_batch(request: Request, owner: Owner, message_batch_id: str) -> dict[str, Any]:
    return _object(request, await _existing(request, owner, message_batch_id))


@router.post(BATCH + "/cancel")
async def cancel_messages_batch(request: Request, owner: Owner, message_batch_id: str) -> dict[str, Any]:
    """Cancel a batch. A batch that has ended stays as it is."""
    batch = await _existing(request, owner, message_batch_id)
    outcome = await gateway_of(request).batches.cancel(batch.id, owner=owner)
    return _object(request, batch if outcome is None or isinstance(outcome, NotCancellable) else outcome)


@router.delete(BATCH)
async def delete_messages_batch(request: Request, owner: Owner, message_batch_id: str) -> dict[str, Any]:
    """Delete a batch that has ended, with its requests and its results."""
    batch = await _existing(request, owner, message_batch_id)
    if not batch.status.is_terminal:
        message = f"This batch has not ended yet: cancel it (POST {BATCH}/cancel), or wait for its end."
        raise invalid_request(message, "message_batch_id")
    if not await gateway_of(request).batches.delete(batch.id, owner=owner):
        raise ApiError(409, "This batch has ended just now. Please try again.", headers=retry_after(CLEARED_UP_S))
    await message_batches.delete_files(gateway_of(request).files, batch)
    return {"id": batch.id, "type": "message_batch_deleted"}


@router.head(BATCH + "/results", include_in_schema=False)
@router.get(BATCH + "/results")
async def messages_batch_results(request: Request, owner: Owner, message_batch_id: str) -> Response:
    """Return the results of a batch that has ended, as lines of JSON."""
    batch = await _existing(request, owner, message_batch_id)
    if not batch.status.is_terminal:
        message = f"This batch has not ended yet: its results are there when it has (GET {BATCH})."
        raise invalid_request(message, "message_batch_id")
    downloads: UnderWay = request.app.state.downloads
    if downloads.is_full(owner):
        raise too_many_downloads()
    lines = message_batches.results(gateway_of(request).files, batch)
    return Download(lines, 200, {}, "application/x-jsonl", downloads.begin(owner))


async def _existing(request: Request, owner: str | None, batch_id: str) -> Batch:
    batch = await gateway_of(request).batches.retrieve(batch_id, owner=owner)
    if batch is None or batch.endpoint != MESSAGES:
        raise ApiError(404, f"No message batch found with id '{batch_id[:200]}'.", param="message_batch_id")
    return batch


def _object(request: Request, batch: Batch) -> dict[str, Any]:
    return message_batch(batch, f"{str(request.base_url).rstrip('/')}{BATCHES}/{batch.id}/results")
