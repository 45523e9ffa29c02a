"""The input of a batch: reading its lines, and what may be wrong with them.

A line is `{"custom_id", "method": "POST", "url", "body": {…}}`. Pure but for reading the file it is given: one
line at a time, however many there are. What a body must hold beyond its model is found out when it runs.
"""

import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gateway.batch_record import LineError
from gateway.body import parse_json_object
from gateway.errors import ApiError

MAX_LINES = 50_000
MAX_ERRORS = 100  # reported at most; the rest of the file is not read then
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # in the file, from 1
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputReport:
    """What the whole input is. With `errors` it must not run."""

    total: int
    model: str | None
    errors: tuple[LineError, ...]


def input_path(directory: Path) -> Path:
    """The batch's own copy of its input, in the batch's directory."""
    return directory / "input.jsonl"


def snapshot_input(source: Path, directory: Path) -> None:
    """Give `source` a second name, or a copy where the file system has no hard links, so that deleting the
    file cannot break the batch. Raises `FileNotFoundError` if it is deleted already."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, input_path(directory))
    except FileNotFoundError:
        directory.rmdir()
        raise
    except OSError:
        shutil.copyfile(source, input_path(directory))


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The lines of an input that `inspect_input` found to be right."""
    for number, text in _numbered(path):
        line = msgspec.json.decode(text)
        yield BatchLine(number, line["custom_id"], line["body"])


def inspect_input(path: Path, endpoint: str, model_names: Collection[str], max_lines: int = MAX_LINES) -> InputReport:
    """Check every line against `endpoint`, `model_names` and each other. Blocks; run it in a thread."""
    seen = _Seen(endpoint, model_names)
    errors: list[LineError] = []
    total = 0
    for number, text in _numbered(path):
        total += 1
        if total > max_lines:
            message = f"The input file has more than {max_lines} requests."
            return InputReport(total, seen.model, (LineError("too_many_tasks", message),))
        error = _line_error(number, text, seen)
        if error is not None and len(errors) < MAX_ERRORS:
            errors.append(error)
    if total == 0:
        errors.append(LineError("empty_file", "The input file is empty."))
    return InputReport(total, seen.model, tuple(errors))


@dataclass(slots=True)
class _Seen:
    """What the lines so far have said. Owned by `inspect_input`."""

    endpoint: str
    model_names: Collection[str]
    model: str | None = None
    custom_ids: set[str] = field(default_factory=set)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            stripped = (text.removeprefix(BOM) if number == 1 else text).strip()
            if stripped:
                yield number, stripped


def _line_error(number: int, text: bytes, seen: _Seen) -> LineError | None:
    try:
        line = parse_json_object(text)
    except ApiError:
        return LineError("invalid_json_line", "This line is not parseable as valid JSON.", None, number)
    fault = _envelope_fault(line, seen) or _body_fault(line["body"], seen)
    return None if fault is None else LineError(*fault, line=number)


def _envelope_fault(line: dict[str, Any], seen: _Seen) -> tuple[str, str, str] | None:
    """(code, message, param) of the first thing wrong around the body."""
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
    """The same for what the batch as a whole depends on in a body."""
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
