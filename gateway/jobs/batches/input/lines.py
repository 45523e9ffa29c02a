"""The input lines of a batch, where they lie, and how they are read.

A line is `{"custom_id", "method": "POST", "url", "body": {…}}`. The file is read piece by piece, because it may be
large. Reading blocks, so callers use a thread. All that is read here was checked before
(gateway/jobs/batches/input/scan.py).
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.files.storage import BATCHES
from gateway.jobs.batches.input.jsonl import numbered_lines

MAX_NUMBER = 2_000_000  # of a line, blank ones included: the store has a bit for each
CHUNK_LINES, CHUNK_BYTES = 500, 2**20  # a chunk ends when it reaches one of these two sizes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # line number in the file, from 1
    custom_id: str
    body: dict[str, Any]


def work_folder(batch_id: str) -> str:
    """Return the folder in the storage that has a batch's own copy of its input, and its results until it is over."""
    return f"{BATCHES}/{batch_id}"


def input_name(batch_id: str) -> str:
    """Return the name of a batch's own copy of its input in the storage. The file may be deleted while it runs."""
    return f"{work_folder(batch_id)}/input.jsonl"


def read_chunks(path: Path) -> Iterator[list[BatchLine]]:
    """Yield the lines of a batch input in chunks. The input must have been checked before: errors are not handled."""
    return in_chunks((decoded_line(number, text), len(text)) for number, _, text in numbered_lines(path))


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
    return next((line.text for line in numbered_lines(path) if line.number == number), None)


async def next_chunk(chunks: Iterator[list[T]]) -> list[T]:
    """Return the next chunk, or an empty list after the last chunk. The chunk is read in a thread."""
    return await asyncio.to_thread(next, chunks, [])
