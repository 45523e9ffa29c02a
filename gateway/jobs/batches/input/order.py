"""The order in which the lines of a batch run: lines whose prompts begin alike run one after the other.

The engine computes a shared beginning once for as long as its KV is in the prefix cache, so a group of lines that share
one runs to its end before the next group begins. Else the order is that of the input. Only the last lines run with the
longest permitted output first, so that no long answer is left alone at the end. A whole batch in this order would need
more KV at its beginning than it has, and was measured to be slower.

Prompts are compared by digests of their blocks, so that sorting holds a few hundred bytes of a line and not its text.
The order lies in a file beside the input, as pairs of a line's number and its offset in bytes. It follows from the
input alone, so it can be made again anywhere. Knows lines and prompts; does not know jobs, windows or results.
"""

import os
import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from gateway.files.local_storage import move_durably
from gateway.jobs.batches.input.jsonl import numbered_lines
from gateway.jobs.batches.input.lines import CHUNK_LINES, BatchLine, decoded_line, in_chunks
from gateway.jobs.batches.input.offload import offload_short
from gateway.jobs.batches.input.prompt_text import output_limit, prompt_bytes
from gateway.protocol.json_body import is_long

BLOCK_BYTES = 128  # prompts are compared in blocks of so many bytes: about 32 tokens, two KV blocks
DIGEST_BYTES = 8  # two different blocks of one batch have the same digest with a chance below 1 : 10^6
MIN_SHARED = 2  # blocks; a shorter common beginning saves less than it costs to keep lines together
ENTRY = struct.Struct("<QQ")  # number of the line from 1, and the offset of its first byte
TAIL_LINES = 16  # at most so many lines at the end run longest first
UNLIMITED = 1 << 62  # stands for the output limit of a line that names none


@dataclass(frozen=True, slots=True)
class LinePrompt:
    """What the order needs to know of one line.

    `digests` holds a digest for each full block of the prompt, which covers the block and all blocks before it. So two
    prompts have as many equal digests as they have equal blocks at their beginnings. `num_bytes` is its size.
    """

    number: int
    offset: int
    num_bytes: int
    digests: bytes
    output_limit: int = UNLIMITED

    @property
    def num_blocks(self) -> int:
        return len(self.digests) // DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class LargeLine:
    """A line that is read only when it runs, because until then it would take much memory."""

    number: int
    offset: int
    num_bytes: int


def order_path(input_path: Path) -> Path:
    """Return the path of the order of the input at `input_path`."""
    return input_path.with_name("order")


def run_order(lines: Sequence[LinePrompt]) -> list[LinePrompt]:
    """Return the lines in the order in which they run.

    Families are lines that share any beginning worth sharing, and groups are lines of a family that share most of it:
    for example, the questions behind one of several sets of examples, all of which follow one system prompt. Families
    and groups begin in the order of their first lines. Inside a group, lines with more in common stand together.
    """
    alike = sorted(lines, key=lambda line: (line.digests, line.number))
    shared = [0 if i == 0 else _num_shared(alike[i - 1], line) for i, line in enumerate(alike)]
    family = _places(alike, [blocks < MIN_SHARED for blocks in shared])
    group = _places(alike, [n < max(MIN_SHARED, line.num_blocks / 2) for n, line in zip(shared, alike, strict=True)])
    order = sorted(range(len(alike)), key=lambda i: (family[i], group[i], i))
    return _longest_last_lines_first([[alike[i] for i in part] for _, part in groupby(order, key=family.__getitem__)])


def _longest_last_lines_first(families: list[list[LinePrompt]]) -> list[LinePrompt]:
    """Return all lines, with the last families sorted by their longest permitted output."""
    num_lines, begin = 0, len(families)
    while begin and (num_lines := num_lines + len(families[begin - 1])) <= TAIL_LINES:
        begin -= 1
    tail = sorted(families[begin:], key=lambda family: -max(line.output_limit for line in family))
    return [line for family in (*families[:begin], *tail) for line in family]


def write_order(path: Path, prompts: Sequence[LinePrompt]) -> None:
    """Write the order of the lines of the input at `path`."""
    ordered_path = order_path(path)
    unfinished = ordered_path.with_name(f"{ordered_path.name}.{os.getpid()}")
    unfinished.write_bytes(b"".join(ENTRY.pack(line.number, line.offset) for line in run_order(prompts)))
    move_durably(unfinished, ordered_path)


def ensure_order(path: Path, num_lines: int | None = None) -> None:
    """Write the order of the checked input at `path`, unless it is there already.

    An order of other than `num_lines` lines is written again (None: it may have any number): it was cut off.
    """
    ordered_path = order_path(path)
    if ordered_path.exists() and num_lines in (None, ordered_path.stat().st_size / ENTRY.size):
        return
    write_order(path, [line_prompt(n, offset, decoded_line(n, text).body) for n, offset, text in numbered_lines(path)])


def read_ordered_chunks(path: Path, done: Container[int]) -> Iterator[list[BatchLine | LargeLine]]:
    """Yield the lines of the input at `path` that are not `done`, in their order, in chunks."""
    return in_chunks(_in_order(path, done))


async def read_large_line(path: Path, line: LargeLine) -> BatchLine:
    """Return a line of the input at `path` while the event loop goes on."""
    return await offload_short(path, _read_line, line)


def _read_line(path: Path, line: LargeLine) -> BatchLine:
    with path.open("rb") as file:
        file.seek(line.offset)
        return decoded_line(line.number, file.read(line.num_bytes))


def _in_order(path: Path, done: Container[int]) -> Iterator[tuple[BatchLine | LargeLine, int]]:
    with path.open("rb") as file, order_path(path).open("rb") as order:
        while entries := order.read(ENTRY.size * CHUNK_LINES):
            for number, offset in ENTRY.iter_unpack(entries):
                if number not in done:
                    file.seek(offset)
                    text = file.readline()
                    line = LargeLine(number, offset, len(text)) if is_long(text) else decoded_line(number, text)
                    yield line, len(text)


def line_prompt(number: int, offset: int, body: dict[str, Any]) -> LinePrompt:
    prompt, limit = prompt_bytes(body), output_limit(body)
    return LinePrompt(number, offset, len(prompt), block_digests(prompt), UNLIMITED if limit is None else limit)


def block_digests(prompt: bytes) -> bytes:
    """Return the digests of the full blocks of `prompt`, one after the other."""
    digests, digest = [], b""
    for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
        digest = blake2b(digest + prompt[end - BLOCK_BYTES : end], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return b"".join(digests)


def _num_shared(first: LinePrompt, second: LinePrompt) -> int:
    """Return with how many equal blocks the two prompts begin, by a binary search: equality ends once and for all."""
    low, high = 0, min(first.num_blocks, second.num_blocks)
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * DIGEST_BYTES
        same = first.digests[end - DIGEST_BYTES : end] == second.digests[end - DIGEST_BYTES : end]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def _places(lines: Sequence[LinePrompt], begins: Sequence[bool]) -> list[int]:
    """Return for each line the smallest line number in its part. A part begins wherever `begins` is true."""
    parts = list(accumulate(begins))
    place: dict[int, int] = {}
    for line, part in zip(lines, parts, strict=True):
        place[part] = min(place.get(part, line.number), line.number)
    return [place[part] for part in parts]
