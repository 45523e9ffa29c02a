"""Read and check the input lines of a batch.

A line is `{"custom_id", "method": "POST", "url", "body": {…}}`, and no longer than the body of an HTTP request may be.
The file is read piece by piece, however large it is. Reading blocks, so callers use a thread. Of a body, only what the
batch as a whole depends on is checked here; the rest is checked when the line runs.
"""

import asyncio
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gateway.batches.model import LineError
from gateway.files.store import PRIVATE_DIR
from gateway.protocol.errors import ApiError
from gateway.protocol.json_body import parse_json_object

MAX_LINES = 50_000  # as in OpenAI's Batch API
MAX_LINE_BYTES = 16 * 2**20
MAX_ERRORS = 100  # errors reported at most; the rest of the file is not read then
CHUNK_LINES, CHUNK_BYTES = 500, 2**20  # a chunk ends at whichever is reached first
PIECE_BYTES = 2**16  # bytes read at once while a line that is too long is skipped
BOM = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which some editors write


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # in the file, from 1
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputReport:
    """The result of checking an input, up to where reading stopped. A batch with `errors` must not run."""

    total: int
    model: str | None
    errors: tuple[LineError, ...]


def input_path(directory: Path) -> Path:
    """Return the path of the batch's own copy of its input, in the batch's directory."""
    return directory / "input.jsonl"


def snapshot_input(source: Path, directory: Path) -> None:
    """Link `source` into the batch's directory, so that the batch can run after the file is deleted.

    Copies it if the file system has no hard links. Raises `FileNotFoundError` if it is deleted already.
    """
    directory.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
    try:
        os.link(source, input_path(directory))
    except FileNotFoundError:
        directory.rmdir()
        raise
    except OSError:
        shutil.copy(source, input_path(directory))  # with its mode


def read_chunks(path: Path) -> Iterator[list[BatchLine]]:
    """Yield the lines of an input without errors, a chunk at a time."""
    chunk: list[BatchLine] = []
    size = 0
    for number, text in _numbered(path):
        line = msgspec.json.decode(text)
        chunk.append(BatchLine(number, line["custom_id"], line["body"]))
        size += len(text)
        if len(chunk) == CHUNK_LINES or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


async def next_chunk(chunks: Iterator[list[BatchLine]]) -> list[BatchLine]:
    """Read the next of `chunks` in a thread. Return an empty list at the end."""
    return await asyncio.to_thread(next, chunks, [])


def inspect_input(
    path: Path,
    endpoint: str,
    model_names: Collection[str],
    max_lines: int = MAX_LINES,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> InputReport:
    """Check every line against `endpoint`, `model_names`, the limits and the other lines."""
    seen = _Seen(endpoint, model_names)
    errors: list[LineError] = []
    total = 0
    for number, text in _numbered(path, max_line_bytes):
        total += 1
        if total > max_lines:
            message = f"The input file has more than {max_lines} requests."
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
    """The model and the custom_ids of the lines so far, with which later lines are compared."""

    endpoint: str
    model_names: Collection[str]
    model: str | None = None
    custom_ids: set[str] = field(default_factory=set)


def _numbered(path: Path, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield each non-blank line with its number. A line longer than `max_bytes` is skipped and comes as b""."""
    with path.open("rb") as file:
        for number in count(1):
            text = file.readline(-1 if max_bytes is None else max_bytes + 1)
            if not text:
                return
            if max_bytes is not None and len(text) > max_bytes and not text.endswith(b"\n"):
                _skip_line(file)
                yield number, b""
            elif stripped := (text.removeprefix(BOM) if number == 1 else text).strip():
                yield number, stripped


def _skip_line(file: BinaryIO) -> None:
    while (piece := file.readline(PIECE_BYTES)) and not piece.endswith(b"\n"):
        pass


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
    """Return (code, message, param) of the first error outside the body, or None."""
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
    """Return (code, message, param) of the first error in the body that concerns the whole batch, or None."""
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
    if body.get("stream"):
        return "unsupported_parameter", "Requests of a batch cannot be streamed.", "body.stream"
    return None
