"""The text of results, from the end of a line until the output files are written.

Results are appended to the storage in groups, and each execution of a batch (gateway/jobs/batches/lines/execution.py)
appends to a content of its own. An entry is `<line number> <1 or 0> <text>`, where 1 means that the line succeeded. The
store (record.lua) knows for each of these contents how many bytes are recorded, and counts a group's lines as done in
the same script. So an entry counts if it lies before this position, and every line that is done has exactly one such
entry, wherever a gateway died: what lies behind the position belongs to a group that was never recorded, and its lines
run again. Reading needs an index of eight bytes for each line; texts are not kept in memory.
"""

from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from gateway.files.storage import ContentLost
from gateway.jobs.batches.input.lines import MAX_NUMBER, work_folder
from gateway.jobs.batches.model import LineResult

_POSITION_BITS = 44  # of an index entry; the bits above them are the number of the file


def results_name(batch_id: str, execution_id: str) -> str:
    """Return the name of the results of one execution in the storage."""
    return f"{work_folder(batch_id)}/results-{execution_id}"


def encode(results: Iterable[LineResult]) -> bytes:
    """Return the entries of `results`, as they are appended to the storage."""
    return b"".join(b"%d %d %s\n" % (result.number, result.succeeded, result.text) for result in results)


class RecordedResults:
    """The recorded results of a batch, in files of which the first bytes are recorded.

    It blocks, so call it in a thread. `completed` and `failed` are the numbers of its results, and
    `max_number` is the largest number of a line with a result.
    """

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self._cleanup = ExitStack()
        self._files: list[BinaryIO] = []
        self._index = array("Q")  # by line number: the position of the entry + 1, and its file; 0: no entry
        self.completed = self.failed = 0
        with self._cleanup:
            for path, size in files:
                self._files.append(self._cleanup.enter_context(path.open("rb")))
                self._add(len(self._files) - 1, size)
            self._cleanup = self._cleanup.pop_all()

    def close(self) -> None:
        self._cleanup.close()

    @property
    def max_number(self) -> int:
        return len(self._index) - 1

    def get(self, number: int) -> tuple[bool, bytes] | None:
        """Return whether the line succeeded, and its text with a newline; None if it has no result."""
        if number > self.max_number or not (entry := self._index[number]):
            return None
        file = self._files[entry >> _POSITION_BITS]
        file.seek((entry & ((1 << _POSITION_BITS) - 1)) - 1)
        _, succeeded, text = file.readline().split(b" ", 2)
        return succeeded == b"1", text

    def _add(self, number_of_file: int, size: int) -> None:
        file, position = self._files[number_of_file], 0
        while position < size:
            entry = file.readline()
            number, succeeded = _header(entry)
            if number > self.max_number:
                self._index.frombytes(bytes(8 * (number - self.max_number)))
            if number == 0 or self._index[number]:
                raise ContentLost(f"the results of a batch are damaged: {file.name} at byte {position}")
            self._index[number] = number_of_file << _POSITION_BITS | position + 1
            self.completed += succeeded
            self.failed += not succeeded
            position += len(entry)


def _header(entry: bytes) -> tuple[int, bool]:
    """Return the number of an entry's line and whether the line succeeded; line 0 if the entry is none."""
    number, _, rest = entry.partition(b" ")
    if not number.isdigit() or int(number) > MAX_NUMBER or rest[1:2] != b" " or not entry.endswith(b"\n"):
        return 0, False
    return int(number), rest[:1] == b"1"
