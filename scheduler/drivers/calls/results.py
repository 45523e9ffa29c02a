"""Writes what becomes of the tasks of a call, counts it, and traces it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from scheduler.clock import Clock
from scheduler.drivers.calls.metrics import TaskMetrics, TaskReport
from scheduler.drivers.calls.settled import SettledTask
from scheduler.store.errors import STORE_AWAY
from scheduler.tasks.queue import TaskQueue
from scheduler.tasks.task import EndedTask, RetriedTask, Task

# Seconds between two attempts at a write, and before the next call after the second call in a row has failed as a
# whole, or after a first one that says that the endpoint is away or busy. They double with each further failure.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
WRITE_RETRIES = 34  # of the results of a call; about a minute

T = TypeVar("T")


class CallTrace(Protocol):
    """The trace of one call of the endpoint."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context of the call, for the endpoint."""
        ...

    def end(self, outcome: str) -> None: ...


class TaskTracer(Protocol):
    def begin_call(self, tasks: Sequence[Task], batch: int) -> CallTrace:
        """Return the trace of a call with `tasks` in a batch of `batch` places."""
        ...

    def record(self, ended: EndedTask, call: CallTrace | None) -> None:
        """Record where the time of an ended task went. None: its end was no call."""
        ...


class TaskResults:
    def __init__(
        self,
        queue: TaskQueue,
        metrics: TaskMetrics,
        report: TaskReport,
        clock: Clock,
        tracer: TaskTracer | None = None,
    ) -> None:
        self._queue = queue
        self._metrics = metrics
        self._report = report
        self._clock = clock
        self._tracer = tracer

    async def write(self, tasks: Sequence[SettledTask], trace: CallTrace | None = None) -> None:
        """Write the ends of tasks, and give the others back for another try. `trace` is that of their call.

        While the store is away, it is tried again: without these writes, the endpoint would compute the tasks again.
        """
        ended = [t for t in tasks if isinstance(t, EndedTask)]
        retried = [t for t in tasks if isinstance(t, RetriedTask)]
        are_written = await until_written(lambda: self._queue.end(ended))
        await until_written(lambda: self._queue.retry(retried))
        wall_ms = self._clock.wall_ms()
        for end, is_written in zip(ended, are_written, strict=True):
            if is_written:
                self._metrics.record_ended(end, (wall_ms - end.task.arrival_ms) / 1000)
                self._report.count_ended(end.task.tier)
                if self._tracer is not None:
                    self._tracer.record(end, trace)
        for r in retried:
            self._metrics.record_retried(r.task.tier)


async def until_written(write: Callable[[], Awaitable[T]]) -> T:
    """Await `write()` until the store takes it. After the last of `WRITE_RETRIES`, raise why it does not."""
    retry = Retry(ExponentialBackoff(cap=MAX_PAUSE_S, base=FIRST_PAUSE_S), WRITE_RETRIES, STORE_AWAY)
    return await retry.call_with_retry(write, _ignore)


async def _ignore(error: Exception) -> None:
    pass
