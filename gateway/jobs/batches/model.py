"""The record of a batch, its states, and the table of the transitions between them.

Plain data. gateway/jobs/batches/store.py moves a batch from one state to another, atomically and only as the table
allows. gateway/jobs/batches/service.py and gateway/jobs/batches/run.py decide when to move a batch.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.jobs.batches.completion_window import window_s
from gateway.jobs.batches.input.checks import LineError
from gateway.jobs.batches.input.size import InputSize

# Time at the end of a completion window in which the files of the results are written. All lines are due before it.
WRITING_SHARE, MAX_WRITING_S = 0.05, 60.0  # of the window; seconds


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"  # the input has errors; no line ran
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # every line has a result; the files are being written
    COMPLETED = "completed"
    EXPIRED = "expired"  # the completion window has passed; finished lines are kept, unless the input is lost
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return not TRANSITIONS[self]

    @property
    def sources(self) -> tuple["BatchStatus", ...]:
        """The states from which a batch may enter this state."""
        return tuple(status for status, targets in TRANSITIONS.items() if self in targets)


_S = BatchStatus
TRANSITIONS: dict[BatchStatus, frozenset[BatchStatus]] = {
    _S.VALIDATING: frozenset({_S.FAILED, _S.IN_PROGRESS, _S.EXPIRED, _S.CANCELLING}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.EXPIRED, _S.CANCELLING}),
    _S.FINALIZING: frozenset({_S.COMPLETED, _S.EXPIRED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.FAILED: frozenset(),
    _S.COMPLETED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """A snapshot of the record of a batch. Times are Unix seconds.

    The time `<state>_at` is set once, when the batch enters that state.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    owner: str | None = None  # name of the API key that created the batch; None: access was open
    model: str | None = None
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    input_sha256: str | None = None  # checksum of the input, in hexadecimal
    engine_us: int = 0  # engine time of the answers, in microseconds
    size: InputSize | None = None  # None: the batch was created by a version that did not count its input
    best_effort: bool = False  # nothing is promised: its lines are never urgent
    traceparent: str | None = None  # W3C trace context of the request that created it; None: it is not traced

    @property
    def window_s(self) -> int:
        return self.expires_at - self.created_at

    @property
    def lines_due_s(self) -> float:
        """The Unix time at which all lines must have ended, so that the files are written within the window."""
        return self.expires_at - min(WRITING_SHARE * self.window_s, MAX_WRITING_S)

    def to_json(self) -> dict[str, Any]:
        """Return the OpenAI `batch` object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": self._errors_json(),
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self._usage_json(),
            "metadata": self.metadata,
        }

    def _errors_json(self) -> dict[str, Any] | None:
        if not self.errors:
            return None
        data = [{"code": e.code, "message": e.message, "param": e.param, "line": e.line} for e in self.errors]
        return {"object": "list", "data": data}

    def _usage_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A request to create a batch. `owner` is the name of the caller's API key (None: access is open)."""

    input_file_id: str
    endpoint: str
    owner: str | None = None
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    best_effort: bool = False

    def to_batch(self, batch_id: str, now_s: int, size: InputSize | None = None) -> Batch:
        return Batch(
            id=batch_id,
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=BatchStatus.VALIDATING,
            created_at=now_s,
            expires_at=now_s + window_s(self.completion_window),
            owner=self.owner,
            metadata=self.metadata,
            output_expires_after_s=self.output_expires_after_s,
            size=size,
            best_effort=self.best_effort,
        )


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one input line. `text` is the line for the output or error file: JSON without a newline."""

    number: int  # line number in the input, from 1
    succeeded: bool
    text: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    engine_us: int = 0
