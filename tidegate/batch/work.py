"""The directory in which `tidegate batch run` keeps what it has done, so that a run can be resumed.

It lies beside the output file (`out.jsonl.batch/`) and has the requests in parts that a server takes as one batch, the
rows they come from, and `state.json`. The directory is removed when the output is complete.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tidegate.batch.rows import STANDARD, BatchProblem, Row

MAX_PART_LINES, MAX_PART_BYTES = 50_000, 200 * 10**6  # of one input file, as in OpenAI's Batch API


@dataclass(slots=True)
class Part:
    """One batch of a run. `retry_key` makes a repeated upload or creation return what the first one made."""

    name: str
    lines: int
    retry_key: str = field(default_factory=lambda: secrets.token_hex(16))
    file_id: str | None = None
    batch_id: str | None = None
    ended: bool = False  # its results are downloaded

    def begin_again(self) -> None:
        """Forget a batch that the server has refused, so that a later attempt makes a new one."""
        self.file_id = self.batch_id = None
        self.retry_key = secrets.token_hex(16)


@dataclass(slots=True)
class Work:
    """A run and its directory. `purpose` says what the run was started for: the same command resumes it."""

    directory: Path
    purpose: dict[str, Any]
    endpoint: str
    parts: list[Part]
    has_rows: bool  # the requests were made from the rows of a table

    def save(self) -> None:
        """Replace `state.json`, so that a crash leaves the old or the new state."""
        state = {"purpose": self.purpose, "endpoint": self.endpoint, "has_rows": self.has_rows}
        partial = self.directory / "state.json.partial"
        with partial.open("w") as file:
            json.dump({**state, "parts": [asdict(part) for part in self.parts]}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.directory / "state.json")

    def path(self, part: Part, kind: str) -> Path:
        """Return the path of a part's `requests`, `rows`, `output` or `errors`."""
        return self.directory / f"{part.name}-{kind}.jsonl"

    def remove(self) -> None:
        shutil.rmtree(self.directory)


def directory_of(output: Path) -> Path:
    """Return the directory of the run that writes `output`; for standard output, one in the current directory."""
    return Path("tidegate.batch") if output == STANDARD else output.with_name(f"{output.name}.batch")


def resumed(directory: Path, purpose: dict[str, Any]) -> Work | None:
    """Return the unfinished run of this directory; None if there is none.

    Raises `BatchProblem` if the directory belongs to a run with another purpose.
    """
    try:
        state = json.loads((directory / "state.json").read_text())
    except FileNotFoundError:
        return None
    if state["purpose"] != purpose:
        raise BatchProblem(
            f"{directory} belongs to an unfinished run with other input or options: finish that one with its own "
            "command, or remove the directory."
        )
    parts = [Part(**part) for part in state["parts"]]
    return Work(directory, purpose, state["endpoint"], parts, state["has_rows"])


def prepared(directory: Path, purpose: dict[str, Any], requests: Iterator[tuple[dict[str, Any], Row | None]]) -> Work:
    """Write `requests` in parts and return the new run.

    Each request comes with its row (None: the input had requests, no rows). Raises `BatchProblem` if there are no
    requests, if two have the same custom_id or if they are for different endpoints.
    """
    shutil.rmtree(directory, ignore_errors=True)  # parts without a state: the preparation was cut off
    directory.mkdir(mode=0o700, parents=True)
    try:
        work = Work(directory, purpose, "", [], False)
        with closing(_PartWriter(work)) as writer:
            for number, (request, row) in enumerate(requests, 1):
                writer.add(number, request, row)
        if not work.parts:
            raise BatchProblem("The input has no rows.")
        work.save()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return work


class _PartWriter:
    """Writes requests and rows to the files of the parts, and begins a new part where one is full."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._ids: set[str] = set()
        self._size = 0
        self._requests: BinaryIO | None = None
        self._rows: BinaryIO | None = None

    def add(self, number: int, request: dict[str, Any], row: Row | None) -> None:
        self._check(number, request)
        text = _json_line(number, request)
        part = self._work.parts[-1] if self._work.parts else None
        if part is None or part.lines == MAX_PART_LINES or self._size + len(text) > MAX_PART_BYTES:
            part = self._begin()
        assert self._requests is not None and self._rows is not None
        self._requests.write(text)
        if row is not None:
            self._work.has_rows = True
            self._rows.write(_json_line(number, row))
        part.lines += 1
        self._size += len(text)

    def close(self) -> None:
        for file in (self._requests, self._rows):
            if file is not None:
                file.close()

    def _begin(self) -> Part:
        self.close()
        part = Part(f"part-{len(self._work.parts) + 1:04}", 0)
        self._work.parts.append(part)
        self._requests = self._work.path(part, "requests").open("wb")
        self._rows = self._work.path(part, "rows").open("wb")
        self._size = 0
        return part

    def _check(self, number: int, request: dict[str, Any]) -> None:
        custom_id, url = request.get("custom_id"), request.get("url")
        if not isinstance(custom_id, str) or not isinstance(url, str):
            raise BatchProblem(f"Request {number} needs 'custom_id' and 'url', both strings.")
        if custom_id in self._ids:
            raise BatchProblem(f"Request {number}: the custom_id {custom_id!r} is not unique.")
        self._work.endpoint = self._work.endpoint or url
        if url != self._work.endpoint:
            raise BatchProblem(f"Request {number} is for {url}, others for {self._work.endpoint}: one endpoint a run.")
        self._ids.add(custom_id)


def _json_line(number: int, value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:
        raise BatchProblem(f"Request {number} has half of a surrogate pair, which is no character.") from None
