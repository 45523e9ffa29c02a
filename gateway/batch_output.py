"""The output of a batch: what a line of it looks like, and writing the output and error files.

Files are written from the results in the store, in the input's order, under ids that follow from the batch's:
writing them again, after a crash at any point, gives the same files, never second ones.
"""

import hashlib
import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gateway.batch_input import BatchLine, input_path, read_lines
from gateway.batch_record import Batch, LineResult
from gateway.batch_store import BatchStore, OwnershipLost
from gateway.files import FileStore

CHUNK_LINES = 500  # results fetched at a time
PURPOSE = "batch_output"
BATCH_EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
BATCH_CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")


def answered_line(batch_id: str, line: BatchLine, request_id: str, status: int, body: Any) -> LineResult:
    """The result of a line that got an HTTP answer: 200 for the output file, anything else for the errors."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    text = _line_text(batch_id, line, response, None)
    if status != 200:
        return LineResult(line.number, False, text)
    usage = body.get("usage") or {}
    return LineResult(
        line.number,
        True,
        text,
        input_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage.get("completion_tokens", 0),
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0,
    )


async def write_files(
    store: BatchStore, files: FileStore, batch: Batch, directory: Path, unfinished: tuple[str, str] | None
) -> dict[str, str]:
    """Write what the batch has to show; `{"output_file_id": …, "error_file_id": …}`, without those that would
    be empty. `unfinished`: (code, message) for lines without a result, None if there can be none.

    Raises `OwnershipLost` if the results are not those that the record counts: another owner has cleared them
    away, and what would be written here is not the truth.
    """
    mark = secrets.token_hex(4)  # a stale owner may be writing at the same time
    paths = {kind: directory / f"{kind}-{mark}.jsonl" for kind in ("output", "error")}
    with paths["output"].open("wb") as output, paths["error"].open("wb") as errors:
        counted = await _write_lines(store, batch, directory, unfinished, output, errors)
    if counted != (batch.completed, batch.failed):
        raise OwnershipLost(batch.id)
    ids = {}
    for kind, path in paths.items():
        if path.stat().st_size == 0:
            continue
        added = await files.add(
            path,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=PURPOSE,
            expires_after_s=batch.output_expires_after_s,
            file_id=f"file-{_derived(batch.id, kind)}",
        )
        ids[f"{kind}_file_id"] = added.id
    return ids


async def _write_lines(
    store: BatchStore,
    batch: Batch,
    directory: Path,
    unfinished: tuple[str, str] | None,
    output: BinaryIO,
    errors: BinaryIO,
) -> tuple[int, int]:
    """How many lines with a result had succeeded, and had failed."""
    completed = failed = 0
    for chunk in _chunks(read_lines(input_path(directory))):
        results = await store.results(batch.id, [line.number for line in chunk])
        for line, result in zip(chunk, results, strict=True):
            if result is None:
                if unfinished is not None:
                    code, message = unfinished
                    error = {"code": code, "message": message}
                    errors.write(_line_text(batch.id, line, None, error) + b"\n")
                continue
            succeeded, text = result
            completed, failed = completed + succeeded, failed + (not succeeded)
            (output if succeeded else errors).write(text + b"\n")
    return completed, failed


def _chunks(lines: Iterator[BatchLine]) -> Iterator[list[BatchLine]]:
    while chunk := list(islice(lines, CHUNK_LINES)):
        yield chunk


def _line_text(batch_id: str, line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line_id = f"batch_req_{_derived(batch_id, str(line.number))}"
    answer = {"id": line_id, "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(answer)


def _derived(batch_id: str, part: str) -> str:
    return hashlib.sha256(f"{batch_id}/{part}".encode()).hexdigest()[:24]
