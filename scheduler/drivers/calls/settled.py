"""What becomes of the tasks of a call: an end, or another try. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.static.interface import CallFailed, ItemResult
from scheduler.tasks.task import MAX_TRIES, ClaimedTask, EndedTask, RetriedTask, Task, isolated_lane

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
    return [_dead(c, _with_failure(c, str(failure))) for c in claimed]


def before_call(claimed: ClaimedTask, wall_ms: int) -> SettledTask | None:
    """Return what becomes of a claimed task that must not be in the call; None if it may be.

    A task is isolated if a worker died during one of its tries, which therefore left no failure behind. If that was the
    last try, the task ends.
    """
    if claimed.task.is_expired(wall_ms):
        return EndedTask(claimed, claimed.task, None, claimed.task.timeout_error)
    if claimed.attempt - 1 <= len(claimed.task.failures):
        return None
    lost = _with_failure(claimed, WORKER_DIED)
    if claimed.attempt > MAX_TRIES:
        return _dead(claimed, lost)
    return RetriedTask(claimed, lost, isolated_lane(lost.tier, claimed.attempt), counts=False)


def _failed(claimed: ClaimedTask, reason: str, lane: str) -> SettledTask:
    task = _with_failure(claimed, reason)
    return _dead(claimed, task) if claimed.attempt >= MAX_TRIES else RetriedTask(claimed, task, lane)


def _with_failure(claimed: ClaimedTask, reason: str) -> Task:
    return replace(claimed.task, failures=(*claimed.task.failures, reason))


def _dead(claimed: ClaimedTask, task: Task) -> EndedTask:
    return EndedTask(claimed, task, None, task.failures[-1])


def _next_lane(claimed: ClaimedTask) -> str:
    return isolated_lane(claimed.task.tier, min(MAX_TRIES, claimed.attempt + 1))
