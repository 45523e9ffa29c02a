"""Read and check the input lines of a batch.

A line is `{"custom_id", "method": "POST", "url", "body": {…}}`. It must not be longer than the body of an HTTP request
may be. The file is read piece by piece, because it may be large. Reading blocks, so callers use a thread. Only the
fields of a body that matter to the whole batch are checked here. The other fields are checked when the line runs.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.batches.jsonl import MAX_LINE_BYTES, numbered_lines
from gateway.batches.model import LineError
from gateway.files.storage import BATCHES
from gateway.protocol.errors import ApiError
from gateway.protocol.json_body import parse_json_object

MAX_LINES = 100_000  # twice as many as in OpenAI's Batch API
MAX_NUMBER = 2_000_000  # of a line, blank ones included: the store has a bit for each
MAX_ERRORS = 100  # maximum number of reported errors; after this number, the rest of the file is not read
CHUNK_LINES, CHUNK_BYTES = 500, 2**20  # a chunk ends when it reaches one of these two sizes
SERVICE_TIERS = (None, "auto", "default", "flex")  # of a line's body; another one would promise what a batch has not

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # line number in the file, from 1
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputReport:
    """The result of checking a batch input. If there are `errors`, the batch must not run.

    `total` is the number of lines that were read. Reading stops early if there are too many lines or errors.
    """

    total: int
    model: str | None
    errors: tuple[LineError, ...]


def work_folder(batch_id: str) -> str:
    """Return the folder in the storage that has a batch's own copy of its input, and its results until it is over."""
    return f"{BATCHES}/{batch_id}"


def input_name(batch_id: str) -> str:
    """Return the name of a batch's own copy of its input in the storage. The file may be deleted while it runs."""
    return f"{work_folder(batch_id)}/input.jsonl"


def read_chunks(path: Path) -> Iterator[list[BatchLine]]:
    """Yield the lines of a batch input in chunks. The input must have been checked before: errors are not handled."""
    return in_chunks((decoded_line(number, text), len(text)) for number, text in numbered_lines(path))


def decoded_line(number: int, text: bytes) -> BatchLine:
    """Return the line with this number and text."""
    line = msgspec.json.decode(text)
    return BatchLine(number, line["custom_id"], line["body"])


def in_chunks(sized: Iterable[tuple[T, int]]) -> Iterator[list[T]]:
    """Yield the lines, given with the sizes of their texts in bytes, in chunks."""
    chunk: list[T] = []
    size = 0
    for line, num_bytes in sized:
        chunk.append(line)
        size += num_bytes
        if len(chunk) == CHUNK_LINES or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def input_line(path: Path, number: int) -> bytes | None:
    """Return the text of one line of a batch input; None if there is no such line."""
    return next((text for found, text in numbered_lines(path) if found == number), None)


async def next_chunk(chunks: Iterator[list[T]]) -> list[T]:
    """Return the next chunk, or an empty list after the last chunk. The chunk is read in a thread."""
    return await asyncio.to_thread(next, chunks, [])


def inspect_input(
    path: Path,
    endpoint: str,
    model_names: Collection[str],
    max_lines: int = MAX_LINES,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> InputReport:
    """Check every line of a batch input, and return a report.

    Every line must be for `endpoint` and for one of `model_names`, and no longer than `max_line_bytes`. All lines must
    name the same model, and each line needs its own custom_id.
    """
    seen = _Seen(endpoint, model_names)
    errors: list[LineError] = []
    total = 0
    for number, text in numbered_lines(path, max_line_bytes):
        total += 1
        if total > max_lines:
            message = f"The input file has more than {max_lines} requests."
            return InputReport(total, seen.model, (LineError("too_many_tasks", message),))
        if number > MAX_NUMBER:
            message = f"The input file has more than {MAX_NUMBER} lines. Leave out the blank ones."
            return InputReport(total, seen.model, (LineError("too_many_tasks", message),))
        error = _line_error(number, text, seen) if text else _too_long(number, max_line_bytes)
        if error is not None:
            errors.append(error)
        if len(errors) == MAX_ERRORS:
            break
    if total == 0:
        errors.append(LineError("empty_file", "The input file is empty."))
    return InputReport(total, seen.model, tuple(errors))


@dataclass(slots=True)
class _Seen:
    """The model and the custom_ids of the lines that were checked so far. Later lines are compared with these."""

    endpoint: str
    model_names: Collection[str]
    model: str | None = None
    custom_ids: set[str] = field(default_factory=set)


def _too_long(number: int, max_bytes: int) -> LineError:
    return LineError("line_too_large", f"This line is larger than {max_bytes} bytes.", None, number)


def _line_error(number: int, text: bytes, seen: _Seen) -> LineError | None:
    try:
        line = parse_json_object(text)
    except ApiError:
        return LineError("invalid_json_line", "This line is not parseable as valid JSON.", None, number)
    fault = _envelope_fault(line, seen) or _body_fault(line["body"], seen)
    return None if fault is None else LineError(*fault, line=number)


def _envelope_fault(line: dict[str, Any], seen: _Seen) -> tuple[str, str, str] | None:
    """Return (code, message, param) of the first error outside the body; None if there is none."""
    for name in ("custom_id", "method", "url", "body"):
        if line.get(name) is None:
            return "missing_required_parameter", f"Missing required parameter: '{name}'.", name
    custom_id, body = line["custom_id"], line["body"]
    if not isinstance(custom_id, str):
        return "invalid_type", "The custom_id must be a string.", "custom_id"
    if custom_id in seen.custom_ids:
        message = "The custom_id for this request is a duplicate of another request. It must be unique."
        return "duplicate_custom_id", message, "custom_id"
    seen.custom_ids.add(custom_id)
    if line["method"] != "POST":
        return "invalid_method", "The method must be POST.", "method"
    if line["url"] != seen.endpoint:
        message = f"The url of this request does not match the batch's endpoint {seen.endpoint}."
        return "url_mismatch", message, "url"
    if not isinstance(body, dict):
        return "invalid_type", "The body must be a JSON object.", "body"
    return None


def _body_fault(body: dict[str, Any], seen: _Seen) -> tuple[str, str, str] | None:
    """Return (code, message, param) of the first error in the body; None if there is none.

    Only the fields that matter to the whole batch are checked.
    """
    model = body.get("model")
    if model is None:
        return "missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model"
    if not isinstance(model, str):
        return "invalid_type", "The model must be a string.", "body.model"
    if model not in seen.model_names:
        return "model_not_found", "The model of this request does not exist.", "body.model"
    seen.model = seen.model or model
    if model != seen.model:
        message = "All requests of a batch must use the same model."
        return "model_mismatch", message, "body.model"
    if body.get("service_tier") not in SERVICE_TIERS:
        message = "Requests of a batch run in the batch tier: their service_tier must be auto, default or flex."
        return "invalid_value", message, "body.service_tier"
    if body.get("stream"):
        return "unsupported_parameter", "Requests of a batch cannot be streamed.", "body.stream"
    return None
