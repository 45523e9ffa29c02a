"""Format result lines, and write the output and error files of a batch.

The files are made from the recorded results (gateway/jobs/batches/lines/results.py), in the order of the input. Their
ids are derived from the batch's id, so files that are written again after a crash replace the earlier files.
"""

import asyncio
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gateway.files.disk import noticing_full_disk
from gateway.files.local_storage import PRIVATE_DIR, opened_in_thread
from gateway.files.storage import Storage
from gateway.files.store import FileStore
from gateway.jobs.batches.input.jsonl import numbered_lines
from gateway.jobs.batches.input.lines import CHUNK_LINES, BatchLine, in_chunks, input_name, next_chunk, work_folder
from gateway.jobs.batches.lines.results import RecordedResults
from gateway.jobs.batches.model import Batch, LineResult
from gateway.jobs.batches.store import BatchStore, OwnershipLost

PURPOSE = "batch_output"
# Characters beside "\n" at which Python's `splitlines` ends a line, and their escapes. JSON has them in strings only.
SEPARATORS = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029")
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
    # /v1/responses and /v1/messages have other names than the completion endpoints.
    read, written = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    details = (usage.get(f"{read}_tokens_details") or {}) | (usage.get(f"{written}_tokens_details") or {})
    apart = usage.get("cache_read_input_tokens") or 0  # of /v1/messages, whose input tokens are without them
    return LineResult(
        line.number,
        True,
        text,
        input_tokens=usage.get(f"{read}_tokens", 0) + apart,
        cached_tokens=details.get("cached_tokens") or apart,
        output_tokens=usage.get(f"{written}_tokens", 0),
        reasoning_tokens=details.get("reasoning_tokens") or details.get("thinking_tokens") or 0,
    )


async def write_files(
    store: BatchStore, files: FileStore, batch: Batch, unfinished: tuple[str, str] | None
) -> dict[str, str]:
    """Write the files of a batch. Return `{"output_file_id": …, "error_file_id": …}`, without the key of an empty file.

    `unfinished` is the error (code, message) of lines without a result; None: these lines are left out. Only with an
    error is the input needed. Raises `ContentLost` if the input or results are missing, `DiskFull`, and `OwnershipLost`
    if the number of results differs from the counts in the batch's record, because another owner has ended the batch.
    """
    directory = files.data_dir / work_folder(batch.id)
    mark = secrets.token_hex(4)  # for unique file names: a former owner may be writing at the same time
    paths = {kind: directory / f"{kind}-{mark}.jsonl" for kind in ("output", "error")}
    try:
        recorded = await store.results(batch.id)
        files.disk.check_results(sum(recorded.values()))  # the output is as long as they are
        parts = [(await files.storage.fetch_appended(name, size), size) for name, size in recorded.items()]
        async with opened_in_thread(lambda: RecordedResults(parts)) as results:
            if (results.completed, results.failed) != (batch.completed, batch.failed):
                raise OwnershipLost(batch.id)
            directory.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
            with noticing_full_disk(), _private(paths["output"]) as output, _private(paths["error"]) as errors:
                await _write_lines(files.storage, batch, results, unfinished, output, errors)
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
    storage: Storage,
    batch: Batch,
    results: RecordedResults,
    unfinished: tuple[str, str] | None,
    output: BinaryIO,
    errors: BinaryIO,
) -> None:
    if unfinished is None:
        for first in range(1, results.max_number + 1, CHUNK_LINES):
            numbers = range(first, min(first + CHUNK_LINES, results.max_number + 1))
            await asyncio.to_thread(_copy, numbers, results, output, errors)
        return
    chunks = in_chunks(_without_bodies(await storage.fetch(input_name(batch.id), batch.input_sha256)))
    while chunk := await next_chunk(chunks):
        await asyncio.to_thread(_copy_or_explain, batch.id, chunk, results, unfinished, output, errors)


class _Named(msgspec.Struct):
    custom_id: str


def _without_bodies(path: Path) -> Iterator[tuple[BatchLine, int]]:
    """Yield the lines of an input, without their bodies, which may take long to parse, and the sizes of their texts."""
    for number, _, text in numbered_lines(path):
        yield BatchLine(number, msgspec.json.decode(text, type=_Named).custom_id, {}), len(text)


def _copy(numbers: Iterable[int], results: RecordedResults, output: BinaryIO, errors: BinaryIO) -> None:
    for number in numbers:
        if (result := results.get(number)) is not None:
            succeeded, text = result
            (output if succeeded else errors).write(text)


def _copy_or_explain(
    batch_id: str,
    lines: Sequence[BatchLine],
    results: RecordedResults,
    unfinished: tuple[str, str],
    output: BinaryIO,
    errors: BinaryIO,
) -> None:
    """Write the results of `lines`, and an error for each line without a result."""
    code, message = unfinished
    for line in lines:
        if results.get(line.number) is not None:
            _copy([line.number], results, output, errors)
        else:
            errors.write(_line_text(batch_id, line, None, {"code": code, "message": message}) + b"\n")


def _line_text(batch_id: str, line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line_id = f"batch_req_{_derived(batch_id, str(line.number))}"
    answer = {"id": line_id, "custom_id": line.custom_id, "response": response, "error": error}
    text = msgspec.json.encode(answer)
    for separator, escaped in SEPARATORS:
        text = text.replace(separator, escaped)
    return text


def _derived(batch_id: str, part: str) -> str:
    return hashlib.sha256(f"{batch_id}/{part}".encode()).hexdigest()[:24]
