"""Batches in the words of Anthropic's Message Batches API: their requests, their object, and their results.

A batch of messages is a batch like any other, whose lines are requests of /v1/messages. It gets its requests with the
call that creates it, so this module writes them into an input file. Does not know HTTP.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, Field

from gateway.dialects.messages.endpoint import MESSAGES
from gateway.files.disk import noticing_full_disk
from gateway.files.store import FileStore, content_name
from gateway.jobs.batches.completion_window import checked_window
from gateway.jobs.batches.forecast.forecasts import Infeasible
from gateway.jobs.batches.input.checks import MAX_LINES, InputChecks, InputRules
from gateway.jobs.batches.input.jsonl import Line
from gateway.jobs.batches.lines.output import BATCH_CANCELLED, BATCH_EXPIRED
from gateway.jobs.batches.model import Batch, BatchStatus, NewBatch
from gateway.jobs.batches.service import BatchService, InputProblem, TooManyBatches
from gateway.protocol.bodies.messages import Text
from gateway.protocol.error_shapes import anthropic_error
from gateway.protocol.errors import invalid_request
from gateway.protocol.json_body import Body, parse

INPUT_EXPIRY_S = 30 * 86_400  # as that of uploaded inputs
# What a line without an answer is called, by the code of its error.
UNANSWERED = {BATCH_CANCELLED[0]: b"canceled", BATCH_EXPIRED[0]: b"expired"}


class BatchRequest(Body):
    custom_id: Annotated[Text, Field(min_length=1, max_length=256)]
    params: dict[str, Any]


class CreateMessageBatch(Body):
    requests: Annotated[list[BatchRequest], Field(min_length=1, max_length=MAX_LINES, fail_fast=True)]
    # Extensions, as in /v1/batches.
    completion_window: Annotated[str, AfterValidator(checked_window)] = "24h"
    best_effort: bool | None = None


@dataclass(frozen=True, slots=True)
class MessageBatchInput:
    """The requests of a new batch, as the text of an input file."""

    text: bytes
    completion_window: str
    best_effort: bool


def message_batch_input(rules: InputRules, body: dict[str, Any]) -> MessageBatchInput:
    """Return the requests of the body that creates a batch. Raises `ApiError` 400 if one breaks the `rules`."""
    created, checks, lines = parse(CreateMessageBatch, body), InputChecks(rules), []
    for i, request in enumerate(created.requests):
        line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES, "body": request.params}
        text = msgspec.json.encode(line)
        checks.add(Line(i + 1, 0, text if len(text) <= rules.max_line_bytes else b""), line)
        if checks.errors:
            [fault] = checks.errors
            raise invalid_request(f"requests[{i}]: {fault.message}", f"requests[{i}]", fault.code)
        lines.append(text + b"\n")
    return MessageBatchInput(b"".join(lines), created.completion_window, bool(created.best_effort))


async def create_message_batch(
    batches: BatchService,
    files: FileStore,
    new: MessageBatchInput,
    owner: str | None,
    new_id: str,
    quota_bytes: int | None,
) -> Batch | InputProblem | Infeasible | TooManyBatches:
    """Store the requests as a file of `owner`, and create a batch of them, as `BatchService.create` does."""
    files.disk.check(len(new.text))
    content = files.incoming / secrets.token_hex(8)
    with noticing_full_disk():
        await asyncio.to_thread(content.write_bytes, new.text)
    file = await files.add(
        content,
        filename=f"batch_{new_id}.jsonl",
        purpose="batch",
        owner=owner,
        expires_after_s=INPUT_EXPIRY_S,
        file_id=f"file-{new_id}",
        quota_bytes=quota_bytes,
    )
    wanted = NewBatch(file.id, MESSAGES, owner, new.completion_window, best_effort=new.best_effort)
    created: Batch | InputProblem | Infeasible | TooManyBatches | None = None
    try:
        created = await batches.create(wanted, new_id)
        return created
    finally:
        if not isinstance(created, Batch):
            await files.delete(file.id, owner=owner)


async def delete_files(files: FileStore, batch: Batch) -> None:
    """Delete the requests and the results of a batch."""
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            await files.delete(file_id, owner=batch.owner)


def message_batch(batch: Batch, results_url: str) -> dict[str, Any]:
    """Return Anthropic's `message_batch` object. `results_url` is where the results will be."""
    has_ended = batch.status.is_terminal
    status = "canceling" if batch.status is BatchStatus.CANCELLING else "ended" if has_ended else "in_progress"
    ended_at = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    has_results = has_ended and batch.status is not BatchStatus.FAILED
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _counts(batch),
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended_at) if has_ended else None,
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        "results_url": results_url if has_results else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    """Return how many requests are in which state. As in Anthropic's API, all are processed until the batch has ended.

    If the input of a batch cannot be used, none of its requests succeeded.
    """
    total = batch.total or (batch.size.lines if batch.size is not None else 0)
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if not batch.status.is_terminal:
        return counts | {"processing": total}
    left = total - batch.completed - batch.failed
    unfinished = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}.get(batch.status, "errored")
    counts |= {"succeeded": batch.completed, "errored": batch.failed}
    counts[unfinished] += left
    return counts


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


async def results(files: FileStore, batch: Batch) -> AsyncIterator[bytes]:
    """Yield the results of a batch that is over, as lines of JSON in Anthropic's shape, several at a time."""
    for file_id in (batch.output_file_id, batch.error_file_id):
        file = None if file_id is None else await files.get(file_id, owner=batch.owner)
        if file is None:
            continue
        rest = b""
        async for chunk in files.storage.read(content_name(file.id), 0, file.bytes):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                yield await asyncio.to_thread(_translated, lines)


class _Answer(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Fault(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Failed(msgspec.Struct):
    error: _Fault


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw
    response: _Answer | None = None
    error: _Fault | None = None


def _translated(lines: list[bytes]) -> bytes:
    return b"".join([_result(msgspec.json.decode(line, type=_Line)) for line in lines])


def _result(line: _Line) -> bytes:
    """Return one line of the results. The message is copied as it is."""
    if line.response is None:
        fault = line.error or _Fault()
        kind = UNANSWERED.get(fault.code)
        result = b'"type":"%b"' % kind if kind else _errored(500, fault.message, None)
    elif line.response.status_code == 200:
        result = b'"type":"succeeded","message":%b' % bytes(line.response.body)
    else:
        message = msgspec.json.decode(line.response.body, type=_Failed).error.message
        result = _errored(line.response.status_code, message, line.response.request_id)
    return b'{"custom_id":%b,"result":{%b}}\n' % (bytes(line.custom_id), result)


def _errored(status: int, message: str, request_id: str | None) -> bytes:
    return b'"type":"errored","error":%b' % msgspec.json.encode(anthropic_error(status, message, request_id))
