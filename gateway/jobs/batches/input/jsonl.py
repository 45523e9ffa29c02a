"""The lines of a JSONL file, read piece by piece, because the file and its lines may be large. Reading blocks."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_LINE_BYTES = 16 * 2**20
PIECE_BYTES = 2**16  # bytes read at once while a line that is too long is skipped
BOM = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which some editors write
BLANKS = b" \t\r\n"  # JSON's white space: around other bytes that Python counts as such, a line is no JSON


class Line(NamedTuple):
    """A line: its number from 1, the offset of its first byte, and its text without white space around it."""

    number: int
    offset: int
    text: bytes


def _ignore(data: bytes) -> None:
    pass


def numbered_lines(
    path: Path, max_bytes: int | None = None, on_bytes: Callable[[bytes], object] = _ignore
) -> Iterator[Line]:
    """Yield each line that is not blank. A line longer than `max_bytes` has b"" as its text.

    `on_bytes` gets all bytes of the file.
    """
    offset = 0
    with path.open("rb") as file:
        for number in count(1):
            raw = file.readline(-1 if max_bytes is None else max_bytes + 1)
            if not raw:
                return
            on_bytes(raw)
            text = raw.removeprefix(BOM) if number == 1 else raw
            begin, offset = offset + len(raw) - len(text), offset + len(raw)
            if max_bytes is not None and len(raw) > max_bytes and not raw.endswith(b"\n"):
                for piece in _rest_of_line(file):
                    on_bytes(piece)
                    offset += len(piece)
                yield Line(number, begin, b"")
            elif stripped := text.strip(BLANKS):
                yield Line(number, begin, stripped)


def _rest_of_line(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.readline(PIECE_BYTES):
        yield piece
        if piece.endswith(b"\n"):
            return
