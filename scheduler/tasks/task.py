"""Tasks: items that clients send for an endpoint with fixed batches, and what is known of them.

Input and result are JSON texts; nobody here reads them. A task lives in the store until some time after its end, so
neither a gateway nor a worker that dies loses one.

The tasks of a tier wait in lanes. The tier's main lane has the tier's own name. A task whose call failed as a whole
waits for its next try in an isolated lane: one bad item fails a whole batch, so the next try is a call with fewer
items, and the last try is a call of its own. So few calls are spent on a bad item, and no good item ends with it.
"""

import math
from dataclasses import dataclass
from enum import Enum

import msgspec

VERSION = 0  # the newest format of a task that this version knows, as `scheduler.request.VERSION` of requests

MAX_TRIES = 3  # a task that has failed so often becomes a dead letter


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
    version: int = 0  # the lowest `VERSION` that a worker must know to serve the task

    @property
    def is_readable(self) -> bool:
        """Whether this version knows all that matters of the task."""
        return self.version <= VERSION

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


def isolated_lane(tier: str, attempt: int) -> str:
    """Return the lane in which a task of `tier` waits for its try number `attempt` (2 or more)."""
    return f"{tier}.{attempt}"


def isolated_lanes(tier: str) -> list[str]:
    """Return the isolated lanes of `tier`; that of the last try is first."""
    return [isolated_lane(tier, attempt) for attempt in range(MAX_TRIES, 1, -1)]


def tier_of(lane: str) -> str:
    return lane.partition(".")[0]  # names of tiers contain no dot


def group_size(lane: str, batch: int) -> int:
    """Return the largest number of tasks of `lane` in one call.

    It falls from the whole batch at the first try by equal factors to 1 at the last try: 64, 8, 1.
    """
    attempt = int(lane.partition(".")[2] or 1)
    share = (MAX_TRIES - attempt) / (MAX_TRIES - 1)
    return max(1, round(math.pow(batch, share)))
