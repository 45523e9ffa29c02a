"""The /v1/uploads endpoints: files that are too large for one request, sent in parts.

Translates between HTTP and the upload service. An API key sees only its own uploads. The file that the parts become is
one of /v1/files.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from gateway.http.multipart import MAX_FORM_BYTES, receive_upload
from gateway.jobs.uploads.model import (
    CANCELLED,
    COMPLETED,
    MAX_PART_BYTES,
    MAX_PARTS,
    MAX_PENDING,
    MAX_UPLOAD_BYTES,
    PENDING,
    NoSuchUpload,
    TooManyUploads,
    UploadRefused,
)
from gateway.protocol.errors import ApiError, invalid_request, invalid_value, retry_after
from gateway.protocol.json_body import Body, parse, read_object
from gateway.protocol.openapi import form_body, json_body
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.batches import ExpiresAfter
from gateway.routes.jobs.files import Owner, check_suffix, quota_bytes_of
from gateway.routes.jobs.idempotency import once
from gateway.state import gateway_of

router = APIRouter()

# The form of a part, for /openapi.json.
PART: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "format": "binary"}},
}


class CreateUploadRequest(Body):
    filename: Annotated[str, Field(min_length=1, max_length=255)]
    purpose: Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
    bytes: int = Field(ge=1, le=MAX_UPLOAD_BYTES)
    mime_type: Annotated[str, Field(max_length=255)]  # needed by OpenAI's API; files have no type here
    expires_after: ExpiresAfter | None = None

    @property
    def file_expires_after_s(self) -> int | None:
        return None if self.expires_after is None else self.expires_after.seconds


class CompleteUploadRequest(Body):
    part_ids: Annotated[list[str], Field(min_length=1, max_length=MAX_PARTS)]
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


@contextmanager
def _refusing(upload_id: str = "") -> Iterator[None]:
    """Turn the refusals of the upload service within the block into `ApiError`."""
    try:
        yield
    except NoSuchUpload:
        raise ApiError(404, f"No such Upload object: {upload_id[:200]}", param="id") from None
    except UploadRefused as refusal:
        raise invalid_request(str(refusal), refusal.param) from None
    except TooManyUploads:
        message = f"You have {MAX_PENDING} pending uploads. Complete or cancel one of them; they expire after an hour."
        raise ApiError(429, message, "requests", code="rate_limit_exceeded", headers=retry_after(60.0)) from None


@router.post("/v1/uploads", openapi_extra=json_body(CreateUploadRequest))
async def create_upload(request: Request, caller: Caller, owner: Owner) -> Response:
    digest = hashlib.sha256()
    body = await read_object(request, partial(parse, CreateUploadRequest), digest.update)
    check_suffix(body.purpose, body.filename, "filename")

    async def create(new_id: str) -> Response:
        with _refusing():
            upload = await gateway_of(request).uploads.create(
                new_id,
                quota_bytes_of(request, caller),
                bytes=body.bytes,
                filename=body.filename,
                purpose=body.purpose,
                owner=owner,
                file_expires_after_s=body.file_expires_after_s,
            )
        return JSONResponse(upload.to_json(PENDING))

    return await once(request, owner, digest.hexdigest(), create)


@router.post("/v1/uploads/{upload_id}/parts", openapi_extra=form_body(PART))
async def add_upload_part(request: Request, owner: Owner, upload_id: str) -> dict[str, Any]:
    uploads, files = gateway_of(request).uploads, gateway_of(request).files
    announced = int(request.headers.get("content-length") or 0)
    if announced > MAX_PART_BYTES + MAX_FORM_BYTES:
        raise _part_too_large(MAX_PART_BYTES)
    with _refusing(upload_id):
        state = await uploads.pending(upload_id, owner=owner)
        files.disk.check(announced)
        form = await receive_upload(
            request.stream(),
            request.headers.get("content-type", ""),
            files.incoming,
            lambda fields: MAX_PART_BYTES,
            _part_too_large,
            files.disk,
            file_field="data",
        )
        try:
            if form.content is None:
                raise invalid_request("Missing required parameter: 'data'.", "data", "missing_required_parameter")
            if form.size == 0:
                raise invalid_value("data", "Invalid value for 'data': the part is empty.")
            return (await uploads.add_part(state.upload, form.content)).to_json()
        finally:
            form.discard()


@router.post("/v1/uploads/{upload_id}/complete", openapi_extra=json_body(CompleteUploadRequest))
async def complete_upload(request: Request, caller: Caller, owner: Owner, upload_id: str) -> dict[str, Any]:
    body = await read_object(request, partial(parse, CompleteUploadRequest))
    with _refusing(upload_id):
        upload, file = await gateway_of(request).uploads.complete(
            upload_id, body.part_ids, body.md5, owner=owner, quota_bytes=quota_bytes_of(request, caller)
        )
    return upload.to_json(COMPLETED, None if file is None else file.to_json())


@router.post("/v1/uploads/{upload_id}/cancel")
async def cancel_upload(request: Request, owner: Owner, upload_id: str) -> dict[str, Any]:
    with _refusing(upload_id):
        return (await gateway_of(request).uploads.cancel(upload_id, owner=owner)).to_json(CANCELLED)


def _part_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The part is larger than {max_bytes // 2**20} MiB.", param="data")
