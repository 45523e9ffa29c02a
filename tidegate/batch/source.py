"""The requests of a run: from a file of requests, from rows and a template, or from the failed lines of a batch."""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tidegate.batch.requests import Template, is_request, row_id
from tidegate.batch.rows import STANDARD, BatchProblem, Row, read_rows
from tidegate.batch.server import BatchServer, results_of

Requests = Iterator[tuple[dict[str, Any], Row | None]]


def requests_of(path: Path, kind: str, template: Template | None) -> Requests:
    """Yield each request of the input with its row. Raises `BatchProblem` if rows have no template, or requests one."""
    rows = read_rows(path, kind)
    first = next(rows, None)
    if first is None:
        raise BatchProblem(f"{path}: the input has no rows.")
    if kind == "jsonl" and is_request(first):
        if template is not None:
            raise BatchProblem(f"{path} has requests already, with 'custom_id' and 'body': leave --template out.")
        yield from ((request, None) for request in chain([first], rows))
        return
    if template is None:
        names = ", ".join(first)
        raise BatchProblem(
            f"{path} has rows ({names}), no requests: add --template with the names of columns in braces."
        )
    for number, row in enumerate(chain([first], rows), 1):
        yield template.request(row, number), row


def rows_by_id(path: Path, kind: str, id_column: str | None) -> Mapping[str, Row]:
    """Return the rows of a table by the custom_ids of the requests that a template makes of them."""
    return {row_id(row, number, id_column): row for number, row in enumerate(read_rows(path, kind), 1)}


def failed_requests(
    server: BatchServer, batch_id: str, directory: Path, rows: Mapping[str, Row] | None = None
) -> Requests:
    """Yield the requests of a batch that have an error, or no result. Downloads its files into `directory`.

    `rows` are those of the table that the requests were made from, by custom_id (None: they come without rows).
    """
    batch = server.retrieve(batch_id)
    if batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        raise BatchProblem(f"{batch_id} is {batch.status}: wait for its end, or cancel it.")
    paths = {kind: directory / f"retried-{kind}.jsonl" for kind in ("input", "output")}
    server.download(batch.input_file_id, paths["input"])
    if batch.output_file_id is not None:
        server.download(batch.output_file_id, paths["output"])
    answered = {custom_id for custom_id, _ in results_of(paths["output"])}
    failed = [request for request in read_rows(paths["input"], "jsonl") if request["custom_id"] not in answered]
    if not failed:
        raise BatchProblem(f"{batch_id} has no failed lines.")
    for request in failed:
        custom_id = request["custom_id"]
        if rows is not None and custom_id not in rows:
            raise BatchProblem(
                f"The table has no row for {custom_id!r}: name the table of this batch, and its --id-column."
            )
        yield request, None if rows is None else rows[custom_id]


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None for standard input."""
    if path == STANDARD:
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise BatchProblem(f"{path}: there is no such file.") from None
