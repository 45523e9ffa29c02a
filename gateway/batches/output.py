"""Format result lines, and write the output and error files of a batch.

The files are made from the results in the store, in the order of the input. Their ids are derived from the batch's id,
so files that are written again after a crash replace the earlier files.
"""

import asyncio
import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gateway.batches.input import BatchLine, input_path, next_chunk, read_chunks
from gateway.batches.model import Batch, LineResult
from gateway.batches.store import BatchStore, OwnershipLost
from gateway.files.store import FileStore

PURPOSE = "batch_output"
BATCH_EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
BATCH_CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")


def answered_line(batch_id: str, line: BatchLine, request_id: str, status: int, body: Any) -> LineResult:
    """Return the result of a line that got an HTTP answer.

    An answer with status 200 goes to the output file. An answer with any other status goes to the error file.
    """
    response = {"status_code": status, "request_id": request_id, "body": body}
    text = _line_text(batch_id, line, response, None)
    if status != 200:
        return LineResult(line.number, False, text)
    usage = body.get("usage") or {}
    # /v1/responses has other names than the completion endpoints.
    read, written = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    return LineResult(
        line.number,
        True,
        text,
        input_tokens=usage.get(f"{read}_tokens", 0),
        cached_tokens=(usage.get(f"{read}_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage.get(f"{written}_tokens", 0),
        reasoning_tokens=(usage.get(f"{written}_tokens_details") or {}).get("reasoning_tokens") or 0,
    )


async def write_files(
    store: BatchStore, files: FileStore, batch: Batch, directory: Path, unfinished: tuple[str, str] | None
) -> dict[str, str]:
    """Write the files of a batch. Return `{"output_file_id": …, "error_file_id": …}`, without the key of an empty file.

    `unfinished` is the error (code, message) of lines without a result; None if every line has a result. Raises
    `OwnershipLost` if the number of results differs from the counts in the batch's record. This happens if another
    owner of the batch has already removed results.
    """
    mark = secrets.token_hex(4)  # for unique file names: a former owner may be writing at the same time
    paths = {kind: directory / f"{kind}-{mark}.jsonl" for kind in ("output", "error")}
    try:
        with _private(paths["output"]) as output, _private(paths["error"]) as errors:
            counted = await _write_lines(store, batch, directory, unfinished, output, errors)
        if counted != (batch.completed, batch.failed):
            raise OwnershipLost(batch.id)
        return {f"{kind}_file_id": i for kind, path in paths.items() if (i := await _add(files, batch, kind, path))}
    finally:  # a failed attempt may be repeated many times, so no attempt may leave files behind
        for path in paths.values():
            path.unlink(missing_ok=True)


async def _add(files: FileStore, batch: Batch, kind: str, path: Path) -> str | None:
    """Move the file at `path` into the file store. Return its id there; None if the file is empty."""
    if path.stat().st_size == 0:
        return None
    added = await files.add(
        path,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=PURPOSE,
        owner=batch.owner,
        expires_after_s=batch.output_expires_after_s,
        file_id=f"file-{_derived(batch.id, kind)}",
    )
    return added.id


def _private(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


async def _write_lines(
    store: BatchStore,
    batch: Batch,
    directory: Path,
    unfinished: tuple[str, str] | None,
    output: BinaryIO,
    errors: BinaryIO,
) -> tuple[int, int]:
    """Write the lines of both files. Return the number of lines that succeeded and the number that failed."""
    completed = failed = 0
    chunks = read_chunks(input_path(directory))
    while chunk := await next_chunk(chunks):
        results = await store.results(batch.id, [line.number for line in chunk])
        await asyncio.to_thread(_write_chunk, batch.id, chunk, results, unfinished, output, errors)
        completed += sum(result is not None and result[0] for result in results)
        failed += sum(result is not None and not result[0] for result in results)
    return completed, failed


def _write_chunk(
    batch_id: str,
    lines: Sequence[BatchLine],
    results: Sequence[tuple[bool, bytes] | None],
    unfinished: tuple[str, str] | None,
    output: BinaryIO,
    errors: BinaryIO,
) -> None:
    for line, result in zip(lines, results, strict=True):
        if result is not None:
            succeeded, text = result
            (output if succeeded else errors).write(text + b"\n")
        elif unfinished is not None:
            code, message = unfinished
            errors.write(_line_text(batch_id, line, None, {"code": code, "message": message}) + b"\n")


def _line_text(batch_id: str, line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line_id = f"batch_req_{_derived(batch_id, str(line.number))}"
    answer = {"id": line_id, "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(answer)


def _derived(batch_id: str, part: str) -> str:
    return hashlib.sha256(f"{batch_id}/{part}".encode()).hexdigest()[:24]
