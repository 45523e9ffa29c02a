"""/v1/batches: create, list, retrieve, cancel.

Translates between HTTP and the batch service. Only parameters are refused here; what is wrong with the content
of an input file appears later, in the batch's `errors`.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gateway.batch_record import Batch
from gateway.batches import BatchService, InputProblem, NewBatch, NotCancellable
from gateway.body import read_json_object
from gateway.errors import ApiError, invalid_request, invalid_value
from gateway.state import gateway_of
from gateway.validation import first_fault

router = APIRouter()

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ExpiresAfter(_Strict):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class CreateBatchRequest(_Strict):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None

    def to_new_batch(self) -> NewBatch:
        expiry = self.output_expires_after
        return NewBatch(
            input_file_id=self.input_file_id,
            endpoint=self.endpoint,
            completion_window=self.completion_window,
            metadata=self.metadata,
            output_expires_after_s=None if expiry is None else expiry.seconds,
        )


@router.post("/v1/batches")
async def create_batch(request: Request) -> dict[str, Any]:
    batches = batches_of(request)
    created = await batches.create(_parse(await read_json_object(request)).to_new_batch())
    if isinstance(created, InputProblem):
        raise invalid_request(created.message, "input_file_id")
    return created.to_json()


@router.get("/v1/batches")
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    page = await batches_of(request).list(after=after, limit=limit)
    if page is None:
        raise invalid_value("after", "Invalid value for 'after': there is no such batch.")
    return page.to_json([batch.to_json() for batch in page.items])


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> dict[str, Any]:
    return _existing(await batches_of(request).retrieve(batch_id), batch_id).to_json()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    outcome = await batches_of(request).cancel(batch_id)
    if isinstance(outcome, NotCancellable):
        message = f"Cannot cancel a batch with status '{outcome.status.value}'."
        raise ApiError(409, message, headers={"x-should-retry": "false"})
    return _existing(outcome, batch_id).to_json()


def batches_of(request: Request) -> BatchService:
    batches = gateway_of(request).batches
    if batches is None:
        raise ApiError(404, "This server runs no batches.")
    return batches


def _parse(body: dict[str, Any]) -> CreateBatchRequest:
    try:
        return CreateBatchRequest.model_validate(body)
    except ValidationError as error:
        fault = first_fault(error.errors(include_url=False, include_input=False, include_context=False))
        raise invalid_request(fault.message, fault.param, fault.code) from None


def _existing(batch: Batch | None, batch_id: str) -> Batch:
    if batch is None:
        raise ApiError(404, f"No batch found with id '{batch_id[:200]}'.", param="id")
    return batch
