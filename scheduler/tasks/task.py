"""Tasks: items that clients send for an endpoint with fixed batches, and what is known of them.

Input and result are JSON texts; nobody here reads them. A task lives in the store until some time after its end, so
neither a gateway nor a worker that dies loses one.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item. Times are wall-clock ms."""

    id: str
    tier: str
    service_tier: str
    arrival_ms: int
    input: bytes = b""  # the store has it apart; only a task that was claimed has it again
    owner: str = ""  # name of the API key; empty while access is open
    keep_ms: int = 3_600_000  # how long the result is kept
    metadata: dict[str, str] | None = None
    failures: tuple[str, ...] = ()  # why each failed try failed
    timeout_ms: int | None = None  # how long it may wait for a try since its arrival
    traceparent: str = ""  # W3C trace context of the request that created it; empty: it is not traced

    def is_expired(self, wall_ms: int) -> bool:
        """Return whether no further try may begin."""
        return self.timeout_ms is not None and wall_ms >= self.arrival_ms + self.timeout_ms

    @property
    def timeout_error(self) -> str:
        return f"It waited longer than its timeout of {(self.timeout_ms or 0) / 1000:g} s."


class TaskState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"  # a dead letter: it has failed too often, or waited too long
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self not in (TaskState.QUEUED, TaskState.RUNNING)


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task as the store knows it."""

    task: Task
    state: TaskState
    attempts: int  # tries begun so far
    ended_ms: int | None = None
    result: bytes | None = None  # JSON
    error: str = ""  # of a dead letter: why the last try failed, or that there was none in time


@dataclass(frozen=True, slots=True)
class ClaimedTask:
    """A task that a worker has claimed. `fence` and `attempt` are those of `scheduler.request.Claimed`."""

    task: Task
    fence: int
    attempt: int


@dataclass(frozen=True, slots=True)
class EndedTask:
    """The end of a claimed task: its result, or why it is a dead letter. `task` holds the failures."""

    claimed: ClaimedTask
    task: Task
    result: bytes | None
    error: str = ""

    @property
    def state(self) -> TaskState:
        return TaskState.DEAD if self.result is None else TaskState.DONE


@dataclass(frozen=True, slots=True)
class RetriedTask:
    """A claimed task that waits in `lane` for its next try. `task` holds the failures.

    If `counts` is False, this claim was no try.
    """

    claimed: ClaimedTask
    task: Task
    lane: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class LaneDepth:
    """The number of tasks that wait in a lane, and the arrival of the oldest one in wall-clock ms."""

    count: int = 0
    oldest_ms: int = 0
