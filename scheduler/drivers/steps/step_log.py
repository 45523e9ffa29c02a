"""The step log: the work, the predicted time and the measured time of each step. Each line is one JSON object.

A cost card can be fitted from it (`python -m loadtest calibrate --step-log FILE`). The first line of each run describes
the engine. The log contains numbers and tier names, but no requests and no texts. Its size is bounded: a file that
reaches half of the limit is renamed to FILE.1, which replaces the older FILE.1.
"""

import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from engine.interface import EngineInfo, StepEviction
from engine.step_time.cost import StepWork

LIMIT_BYTES = 1 << 30  # limit of FILE and FILE.1 together
BUFFER_BYTES = 1 << 16  # about 300 steps; a crash loses no more than these


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One step, with the features of its `StepWork`. Field names are the JSON keys.

    `prefills` is the number of prefill chunks.
    """

    t: float  # time on the loop's clock when the step's result was applied
    elapsed_s: float
    prefill_tokens: int
    attended: float
    context_tokens: int
    decodes: int
    prefills: int
    predicted_s: float = 0.0  # without a safety factor; 0: no prediction was made
    shed: int = 0  # sequences evicted from the step; if there are any, its time says nothing about its work
    tiers: Mapping[str, int] = field(default_factory=dict)  # number of sequences that ran, by tier

    @classmethod
    def of(
        cls,
        work: StepWork,
        elapsed_s: float,
        t: float,
        predicted_s: float = 0.0,
        shed: int = 0,
        tiers: Mapping[str, int] | None = None,
    ) -> "StepEntry":
        features = (work.prefill_tokens, work.attended, work.context_tokens, work.decodes, work.prefills)
        return cls(t, elapsed_s, *features, predicted_s, shed, tiers or {})

    @property
    def work(self) -> StepWork:
        return StepWork(self.prefill_tokens, self.attended, self.context_tokens, self.decodes, self.prefills)


class StepLogError(Exception):
    """The step log cannot be written. The message is a sentence for the user."""


class StepLog(Protocol):
    def record(self, entry: StepEntry) -> None: ...

    def close(self) -> None: ...


class NoStepLog:
    """A step log that keeps nothing."""

    def record(self, entry: StepEntry) -> None:
        pass

    def close(self) -> None:
        pass


def open_step_log(path: Path | None, info: EngineInfo) -> StepLog:
    """Return a log that appends to `path`, or one that keeps nothing if `path` is None.

    Raises `StepLogError` if the file cannot be opened.
    """
    if path is None:
        return NoStepLog()
    try:
        return FileStepLog(path, info)
    except OSError as error:
        raise StepLogError(f"the step log {path} cannot be written: {error.strerror}") from error


class FileStepLog:
    """A step log that appends to the file `path`.

    It writes to the disk every few hundred steps and at `close`. Raises `OSError` if the file cannot be opened. If the
    disk fills up later, the log ends and the worker continues.
    """

    def __init__(self, path: Path, info: EngineInfo, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._info = info
        self._half_bytes = limit_bytes // 2
        self._is_broken = False
        self._open()

    def record(self, entry: StepEntry) -> None:
        if self._is_broken:
            return
        try:
            if self._size >= self._half_bytes:
                self._file.close()
                self._path.replace(_older(self._path))
                self._open()
            self._write({name: getattr(entry, name) for name in StepEntry.__slots__})
        except OSError:
            self._is_broken = True

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=BUFFER_BYTES)
        self._size = self._path.stat().st_size
        self._write({"engine": asdict(self._info)})

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"), default=_plain).encode() + b"\n"
        self._file.write(line)
        self._size += len(line)


@dataclass(frozen=True, slots=True)
class StepRecords:
    """The contents of a step log: the last engine that wrote to it, and the steps of that engine."""

    engine: EngineInfo | None
    entries: tuple[StepEntry, ...]


def read_step_log(path: Path, most: int = 200_000) -> StepRecords:
    """Return the newest `most` steps of the last engine in a log, sorted from the oldest to the newest.

    If a crash has cut the last line short, this line is left out. Unknown keys are ignored. Raises `OSError` if the
    file cannot be read, and `ValueError` if it is not a step log.
    """
    engine: EngineInfo | None = None
    entries: deque[StepEntry] = deque(maxlen=most)
    older = _older(path)
    for file in (older, path) if older.exists() else (path,):
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith("\n"):
                    continue
                record = _parsed(line, f"{file}:{number}")
                if isinstance(record, StepEntry):
                    entries.append(record)
                elif record != engine:
                    engine = record
                    entries.clear()
    return StepRecords(engine, tuple(entries))


def _parsed(line: str, place: str) -> StepEntry | EngineInfo:
    try:
        record = json.loads(line)
        if "engine" in record:
            return _engine(record["engine"])
        known = {f.name for f in fields(StepEntry)}
        return StepEntry(**{key: value for key, value in record.items() if key in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{place} is not a line of a step log: {error}") from error


def _engine(record: dict[str, Any]) -> EngineInfo:
    known = {f.name for f in fields(EngineInfo)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items() if k in known}
    if "step_eviction" in values:
        values["step_eviction"] = StepEviction(values["step_eviction"])
    return EngineInfo(**values)


def _plain(value: object) -> object:
    """Return an engine setting in a form that JSON can hold."""
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{value!r} cannot be written to a step log")


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
