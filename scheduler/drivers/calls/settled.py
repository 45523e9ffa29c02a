"""What becomes of the tasks of a call: an end, or another try. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.static.interface import CallFailed, ItemResult
from scheduler.drivers.calls.lanes import MAX_TRIES, isolated_lane
from scheduler.tasks.task import ClaimedTask, EndedTask, RetriedTask, Task

WORKER_DIED = "The worker ended during the call."

SettledTask = EndedTask | RetriedTask


def of_results(claimed: Sequence[ClaimedTask], results: Sequence[ItemResult]) -> list[SettledTask]:
    """Return what becomes of the tasks of a call that returned a result for each item.

    An item that failed alone is tried again at its old place: it harms no other item.
    """
    pairs = zip(claimed, results, strict=True)
    return [_failed(c, r.error, c.task.tier) if r.error else EndedTask(c, c.task, r.output) for c, r in pairs]


def of_failure(claimed: Sequence[ClaimedTask], failure: CallFailed, may_isolate: bool) -> list[SettledTask]:
    """Return what becomes of the tasks of a call that failed as a whole.

    One of its items may be the cause, so the next tries are calls with fewer items.
    """
    return [_failed(c, str(failure), _next_lane(c) if may_isolate else c.task.tier) for c in claimed]


def set_apart(claimed: Sequence[ClaimedTask], is_isolated: bool) -> list[SettledTask]:
    """Return the next lanes of the tasks of a busy call, so that others have their turn. It was no try of its tasks.

    They are tried again in smaller calls, and each alone if the call was already isolated.
    """
    attempt = MAX_TRIES if is_isolated else 2
    return [RetriedTask(c, c.task, isolated_lane(c.task.tier, attempt), counts=False) for c in claimed]


def of_blamed(claimed: Sequence[ClaimedTask], failure: CallFailed) -> list[SettledTask]:
    """Return the ends of tasks that make an endpoint busy: they were tried often, so there is no other try."""
    return [_dead(c, replace(c.task, failures=(*c.task.failures, str(failure)))) for c in claimed]


def before_call(claimed: ClaimedTask, wall_ms: int) -> SettledTask | None:
    """Return what becomes of a claimed task that must not be in the call; None if it may be."""
    if claimed.task.is_expired(wall_ms):
        return EndedTask(claimed, claimed.task, None, claimed.task.timeout_error)
    return of_suspect(claimed) if is_suspect(claimed) else None


def is_suspect(claimed: ClaimedTask) -> bool:
    """Return whether a worker died during one of the task's tries: a try that left no failure behind."""
    return claimed.attempt - 1 > len(claimed.task.failures)


def of_suspect(claimed: ClaimedTask) -> SettledTask:
    """Return what becomes of a task whose last worker died: it is isolated, or it was the last try."""
    lost = replace(claimed.task, failures=(*claimed.task.failures, WORKER_DIED))
    if claimed.attempt > MAX_TRIES:
        return _dead(claimed, lost)
    return RetriedTask(claimed, lost, isolated_lane(lost.tier, claimed.attempt), counts=False)


def _failed(claimed: ClaimedTask, reason: str, lane: str) -> SettledTask:
    task = replace(claimed.task, failures=(*claimed.task.failures, reason))
    return _dead(claimed, task) if claimed.attempt >= MAX_TRIES else RetriedTask(claimed, task, lane)


def _dead(claimed: ClaimedTask, task: Task) -> EndedTask:
    return EndedTask(claimed, task, None, task.failures[-1])


def _next_lane(claimed: ClaimedTask) -> str:
    return isolated_lane(claimed.task.tier, min(MAX_TRIES, claimed.attempt + 1))
