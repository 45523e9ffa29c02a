"""Reads the step log of a worker."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.interface import EngineInfo
from scheduler.drivers.steps.step_log import StepEntry, older_log


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
    older = older_log(path)
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
        record = msgspec.json.decode(line)
        if "engine" in record:
            return msgspec.convert(record["engine"], EngineInfo)
        return msgspec.convert(record, StepEntry)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place} is not a line of a step log: {error}") from error
