"""The lines of a JSONL file, read piece by piece, because the file and its lines may be large. Reading blocks."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 16 * 2**20
PIECE_BYTES = 2**16  # bytes read at once while a line that is too long is skipped
BOM = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which some editors write
BLANKS = b" \t\r\n"  # JSON's white space: around other bytes that Python counts as such, a line is no JSON


def numbered_lines(path: Path, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the text of each non-blank line. A line longer than `max_bytes` has b"" as its text."""
    with path.open("rb") as file:
        for number in count(1):
            text = file.readline(-1 if max_bytes is None else max_bytes + 1)
            if not text:
                return
            if max_bytes is not None and len(text) > max_bytes and not text.endswith(b"\n"):
                _skip_line(file)
                yield number, b""
            elif stripped := (text.removeprefix(BOM) if number == 1 else text).strip(BLANKS):
                yield number, stripped


def _skip_line(file: BinaryIO) -> None:
    while (piece := file.readline(PIECE_BYTES)) and not piece.endswith(b"\n"):
        pass
