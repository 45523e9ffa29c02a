"""The /v1/files endpoints: upload, list, retrieve, download and delete files.

Translates between HTTP and the file store, and sets the limits of an upload. An API key sees only its own files. The
lines of a batch input are not checked here: their errors appear later, in the batch that uses the file.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from gateway.files.storage import ContentDamaged, ContentLost
from gateway.files.store import FileStore, QuotaExceeded, StoredFile, content_name
from gateway.http.download import forget_unread_range, saved_name, stored_content
from gateway.http.multipart import MAX_FORM_BYTES, Upload, receive_upload
from gateway.identity import ApiKey
from gateway.protocol.errors import ApiError, invalid_request, invalid_value
from gateway.protocol.openapi import form_body
from gateway.routes.dependencies import Caller
from gateway.routes.jobs.idempotency import idempotency_key, once
from gateway.state import gateway_of

router = APIRouter()

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_FILE_BYTES = 512 * 10**6  # as in OpenAI's API
MAX_BATCH_BYTES = 200 * 10**6  # limit for a batch input, as in OpenAI's API
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400  # limits of `expires_after` in seconds, as in OpenAI's API
NO_RETRY = {"x-should-retry": "false"}
# The form of an upload, for /openapi.json.
UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
    },
}


async def _owner(caller: Caller) -> str | None:
    return None if caller is None else caller.name


# The name of the caller's API key; None if access is open. It is the owner of the caller's files and batches.
Owner = Annotated[str | None, Depends(_owner)]


@router.post("/v1/files", openapi_extra=form_body(UPLOAD))
async def upload_file(request: Request, caller: Caller, owner: Owner) -> Response:
    files, quota_bytes = gateway_of(request).files, quota_bytes_of(request, caller)
    reserved = 0 if quota_bytes is None else await gateway_of(request).uploads.reserved_bytes(owner)
    announced = int(request.headers.get("content-length") or 0)
    if announced > MAX_FILE_BYTES + MAX_FORM_BYTES:
        raise _too_large(MAX_FILE_BYTES)  # refused before the client sends the file
    digest = None if idempotency_key(request) is None else hashlib.sha256()
    files.disk.check(announced)
    room = quota_bytes
    if digest is None and quota_bytes is not None:  # the repetition of an upload may be in the quota already
        room = await _room(files, owner, quota_bytes, announced, reserved)
    upload = await _receive(request, files, owner, room, None if digest is None else digest.update)

    async def store(new_id: str) -> Response:
        stored = await _store(files, upload, owner, quota_bytes, reserved, f"file-{new_id}")
        return JSONResponse(stored.to_json())

    try:
        return await once(request, owner, _fingerprint(upload, digest), store)
    finally:
        upload.discard()


def _fingerprint(upload: Upload, content: "hashlib._Hash | None") -> str:
    """Return what tells two uploads apart. Their raw bodies would not do: clients draw a new boundary for each."""
    return json.dumps([upload.filename, sorted(upload.fields.items()), content.hexdigest() if content else ""])


async def _receive(
    request: Request,
    files: FileStore,
    owner: str | None,
    room_bytes: int | None,
    on_content: Callable[[bytes], object] | None,
) -> Upload:
    """Receive a file. All that `owner` sends at the same time may have `room_bytes` together (None: any number)."""
    content_type = request.headers.get("content-type", "")
    async with aclosing(_counted(request.stream(), files.arriving, owner, room_bytes)) as chunks:
        return await receive_upload(
            chunks, content_type, files.incoming, _max_bytes, _too_large, files.disk, on_content
        )


async def _counted(
    chunks: AsyncIterator[bytes], arriving: Counter[str | None], owner: str | None, room_bytes: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield `chunks`, and count them in `arriving` meanwhile. The length of a form need not be announced."""
    held = 0
    try:
        async for chunk in chunks:
            held += len(chunk)
            arriving[owner] += len(chunk)
            if room_bytes is not None and arriving[owner] - MAX_FORM_BYTES > room_bytes:
                raise QuotaExceeded(arriving[owner], room_bytes)
            yield chunk
    finally:
        arriving[owner] -= held
        if not arriving[owner]:
            del arriving[owner]


@router.get("/v1/files")
async def list_files(
    request: Request,
    owner: Owner,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    page = await gateway_of(request).files.page(
        owner=owner, purpose=purpose, after=after, limit=limit, newest_first=order == "desc"
    )
    if page is None:
        raise invalid_value("after", "Invalid value for 'after': there is no such file.")
    return page.to_json([file.to_json() for file in page.items])


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, owner: Owner, file_id: str) -> dict[str, Any]:
    return (await _existing(request, owner, file_id)).to_json()


@router.head("/v1/files/{file_id}/content", include_in_schema=False)
@router.get("/v1/files/{file_id}/content")
async def file_content(request: Request, owner: Owner, file_id: str) -> Response:
    file = await _existing(request, owner, file_id)
    storage, name = gateway_of(request).files.storage, content_name(file.id)
    media_type = "application/jsonl" if file.purpose == "batch_output" else "application/octet-stream"
    try:
        if (path := storage.path(name)) is None:
            return await stored_content(request, request.app.state.downloads, storage, name, file, media_type)
        stat_result = await asyncio.to_thread(path.stat)
    except ContentDamaged:
        raise ApiError(500, "This file is damaged in the server's storage.", "server_error", headers=NO_RETRY) from None
    except (FileNotFoundError, ContentLost):  # the file was deleted just now
        raise _no_such_file(file_id) from None
    forget_unread_range(request, stat_result.st_size)
    return FileResponse(path, media_type=media_type, filename=saved_name(file), stat_result=stat_result)


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, owner: Owner, file_id: str) -> dict[str, Any]:
    if not await gateway_of(request).files.delete(file_id, owner=owner):
        raise _no_such_file(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


def check_suffix(purpose: str, filename: str, param: str) -> None:
    if purpose == "batch" and not filename.endswith(".jsonl"):
        raise invalid_value(param, "Invalid file format for Batch API. Must be .jsonl")


def quota_bytes_of(request: Request, caller: ApiKey | None) -> int | None:
    """Return the bytes that all files of the caller's key may have; None if there is no limit."""
    own = caller.files_quota_mb if caller is not None else None
    quota_mb = own or gateway_of(request).files_quota_mb
    return None if quota_mb is None else quota_mb * 2**20


async def _room(files: FileStore, owner: str | None, quota_bytes: int, announced: int, reserved: int) -> int:
    """Return how many bytes the owner may still upload.

    Refuses an upload before its file is sent, if the `announced` length of its form shows that it is too large.
    `reserved` are the bytes that pending uploads of the owner have announced.
    """
    await files.sweep()
    used_bytes = await files.used_bytes(owner) + reserved
    if used_bytes + announced - MAX_FORM_BYTES > quota_bytes:
        raise QuotaExceeded(used_bytes, quota_bytes)
    return quota_bytes - used_bytes


async def _store(
    files: FileStore, upload: Upload, owner: str | None, quota_bytes: int | None, reserved: int, file_id: str
) -> StoredFile:
    purpose = _purpose(upload)
    expires_after_s = _expiry_s(upload)
    if upload.content is None:
        raise _missing("file")
    check_suffix(purpose, upload.filename, "file")
    if upload.size > _max_bytes(upload.fields):  # checked again, because the purpose may come after the file
        raise _too_large(_max_bytes(upload.fields))
    try:
        return await files.add(
            upload.content,
            filename=upload.filename,
            purpose=purpose,
            owner=owner,
            expires_after_s=expires_after_s,
            file_id=file_id,
            quota_bytes=None if quota_bytes is None else quota_bytes - reserved,
        )
    except QuotaExceeded as error:
        raise QuotaExceeded(error.used_bytes + reserved, error.quota_bytes + reserved) from None


def _max_bytes(fields: Mapping[str, str]) -> int:
    return MAX_BATCH_BYTES if fields.get("purpose") == "batch" else MAX_FILE_BYTES


def _purpose(upload: Upload) -> str:
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise _missing("purpose")
    if purpose not in PURPOSES:
        raise invalid_value("purpose", f"Invalid value for 'purpose': must be one of {', '.join(PURPOSES)}.")
    return purpose


def _expiry_s(upload: Upload) -> int | None:
    """Return after how many seconds the file expires; None if the upload does not say it."""
    anchor = upload.fields.get("expires_after[anchor]")
    seconds = upload.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid_value("expires_after[anchor]", "Invalid value for 'expires_after[anchor]': must be created_at.")
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 9:
        raise invalid_value("expires_after[seconds]", "Invalid value for 'expires_after[seconds]': must be an integer.")
    if not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        limits = f"must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
        raise invalid_value("expires_after[seconds]", f"Invalid value for 'expires_after[seconds]': {limits}")
    return int(seconds)


async def _existing(request: Request, owner: str | None, file_id: str) -> StoredFile:
    file = await gateway_of(request).files.get(file_id, owner=owner)
    if file is None:
        raise _no_such_file(file_id)
    return file


def _no_such_file(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id[:200]}", param="id")


def _missing(name: str) -> ApiError:
    return invalid_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The file is larger than {max_bytes // 10**6} MB.", param="file")
