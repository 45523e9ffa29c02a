"""A round trip: from input to output through a server, with progress, and resumable at any point.

Every part is uploaded, created as a batch, awaited and downloaded. Each of these is recorded before the next, so the
same command goes on where it was cut off.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from openai.types import Batch
from tqdm import tqdm

from tidegate.batch.requests import answer_of, error_text
from tidegate.batch.rows import BatchProblem, row_writer
from tidegate.batch.server import BatchServer, errors_of, eta_of
from tidegate.batch.work import Part, Work


def submit(work: Work, server: BatchServer, metadata: dict[str, str], window: str, best_effort: bool = False) -> None:
    """Upload and create the batches that are not there yet."""
    for part in work.parts:
        if part.file_id is None:
            part.file_id = server.upload(work.path(part, "requests"), part.retry_key)
            work.save()
        if part.batch_id is None:
            batch = server.create(part.file_id, work.endpoint, metadata, window, part.retry_key, best_effort)
            part.batch_id = batch.id
            work.save()


def await_results(work: Work, server: BatchServer, tell: Callable[[str], None]) -> None:
    """Wait for all batches, show their progress on a terminal, and download their results."""
    finished = 0  # lines of the parts before
    with tqdm(total=sum(part.lines for part in work.parts), unit="lines", disable=None, file=sys.stderr) as bar:
        for part in work.parts:
            if not part.ended:
                for done, eta in _await_part(work, part, server, tell):
                    bar.set_postfix_str(eta, refresh=False)
                    bar.update(finished + done - bar.n)
            finished += part.lines
            bar.update(finished - bar.n)


def write_output(work: Work, output: Path, kind: str) -> tuple[int, int]:
    """Write each request's result, or its row with the answer, to `output` in the order of the input.

    Return how many lines succeeded, and how many failed.
    """
    succeeded = failed = 0
    with row_writer(output, kind) as writer:
        for part in work.parts:
            for result, row in _joined(work, part):
                error = error_text(result)
                succeeded, failed = succeeded + (error is None), failed + (error is not None)
                writer.write(result if row is None else {**row, "answer": _answer(result, error), "error": error})
    return succeeded, failed


def check_accepted(batch: Batch) -> None:
    """Raise `BatchProblem` if the server has refused the input of the batch."""
    if batch.status == "failed":
        raise BatchProblem("\n".join([f"{batch.id}: the server refused the input.", *errors_of(batch)]))


def _answer(result: Mapping[str, Any], error: str | None) -> str | list[float] | None:
    return answer_of(result["response"]["body"]) if error is None else None


def _await_part(work: Work, part: Part, server: BatchServer, tell: Callable[[str], None]) -> Iterator[tuple[int, str]]:
    """Yield the number of finished lines and the expected end, until the batch has ended; then download its results."""
    assert part.batch_id is not None
    for batch in server.updates(part.batch_id, tell):
        counts = batch.request_counts
        yield 0 if counts is None else counts.completed + counts.failed, eta_of(batch)
    if batch.status == "failed":
        _leave(work, part)
    check_accepted(batch)
    if batch.status != "completed":
        tell(f"{batch.id} is {batch.status}: lines without an answer have an error instead.")
    for kind, file_id in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
        if file_id is not None:
            server.download(file_id, work.path(part, kind))
    part.ended = True
    work.save()


def _leave(work: Work, part: Part) -> None:
    """Let the same command begin again with a part that the server has refused, or with a mended input."""
    part.begin_again()
    if any(other.batch_id is not None for other in work.parts):
        work.save()
    else:
        work.remove()


def _joined(work: Work, part: Part) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield (result line, row) for each request of a part. Results stay on disk: only their places are in memory."""
    files = {kind: work.path(part, kind) for kind in ("output", "errors")}
    places = {custom_id: (kind, place) for kind, path in files.items() for custom_id, place in _places(path)}
    opened: Mapping[str, BinaryIO] = {kind: path.open("rb") for kind, path in files.items() if path.exists()}
    try:
        with work.path(part, "requests").open("rb") as requests, work.path(part, "rows").open("rb") as rows:
            for text in requests:
                custom_id = json.loads(text)["custom_id"]
                result = _read_at(opened, places.get(custom_id)) or _lost(custom_id)
                yield result, json.loads(rows.readline()) if work.has_rows else None
    finally:
        for file in opened.values():
            file.close()


def _places(path: Path) -> Iterator[tuple[str, int]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        place = 0
        for text in file:
            yield json.loads(text)["custom_id"], place
            place += len(text)


def _read_at(opened: Mapping[str, BinaryIO], place: tuple[str, int] | None) -> dict[str, Any] | None:
    if place is None:
        return None
    file = opened[place[0]]
    file.seek(place[1])
    result: dict[str, Any] = json.loads(file.readline())
    return result


def _lost(custom_id: str) -> dict[str, Any]:
    error = {"code": "no_result", "message": "The server returned no result for this line."}
    return {"id": None, "custom_id": custom_id, "response": None, "error": error}
