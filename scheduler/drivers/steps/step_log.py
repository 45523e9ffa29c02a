"""The step log: the work, the predicted time and the measured time of each step. Each line is one JSON object.

A cost card can be fitted from it (`python -m loadtest calibrate --step-log FILE`). The first line of each run describes
the engine. The log contains numbers and tier names, but no requests and no texts. Its size is bounded: a file that
reaches half of the limit is renamed to FILE.1, which replaces the older FILE.1.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.interface import EngineInfo
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
    tiers: Mapping[str, int] = field(default_factory=dict)  # number of sequences that ran, by tier

    @classmethod
    def of(
        cls,
        work: StepWork,
        elapsed_s: float,
        t: float,
        predicted_s: float = 0.0,
        tiers: Mapping[str, int] | None = None,
    ) -> "StepEntry":
        features = (work.prefill_tokens, work.attended, work.context_tokens, work.decodes, work.prefills)
        return cls(t, elapsed_s, *features, predicted_s, tiers or {})

    @property
    def work(self) -> StepWork:
        return StepWork(self.prefill_tokens, self.attended, self.context_tokens, self.decodes, self.prefills)


class StepLogError(Exception):
    """The step log cannot be written. The message is a sentence for the user."""


def open_step_log(path: Path | None, info: EngineInfo) -> "AbstractContextManager[StepLog | None]":
    """Return a log that appends to `path`, and closes when the context ends; None if `path` is None.

    Raises `StepLogError` if the file cannot be opened.
    """
    if path is None:
        return nullcontext()
    try:
        return closing(StepLog(path, info))
    except OSError as error:
        raise StepLogError(f"the step log {path} cannot be written: {error.strerror}") from error


class StepLog:
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
                self._path.replace(older_log(self._path))
                self._open()
            self._write(entry)
        except OSError:
            self._is_broken = True

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=BUFFER_BYTES)
        self._size = self._path.stat().st_size
        self._write({"engine": self._info})

    def _write(self, record: Any) -> None:
        line = msgspec.json.encode(record) + b"\n"
        self._file.write(line)
        self._size += len(line)


def older_log(path: Path) -> Path:
    """Return the file that has the older half of the log `path`."""
    return path.with_name(f"{path.name}.1")
