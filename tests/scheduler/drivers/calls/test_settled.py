"""What becomes of the tasks of a call."""

from msgspec.structs import replace

from engine.static.interface import CallFailed, ItemResult
from scheduler.drivers.calls.settled import WORKER_DIED, before_call, of_failure, of_results
from scheduler.tasks.task import ClaimedTask, EndedTask, RetriedTask
from tests.scheduler.tasks.builders import make_task


def claimed(attempt: int, failures: int | None = None) -> ClaimedTask:
    """A task at its try number `attempt`; each try before has left a failure, unless the test says otherwise."""
    told = attempt - 1 if failures is None else failures
    return ClaimedTask(make_task(failures=tuple(f"failure {n}" for n in range(told))), fence=7, attempt=attempt)


def lanes_of(attempt: int, failure: CallFailed, may_isolate: bool) -> list[str]:
    return [o.lane for o in of_failure([claimed(attempt)], failure, may_isolate) if isinstance(o, RetriedTask)]


def test_an_item_that_failed_alone_is_tried_again_at_its_old_place() -> None:
    (outcome,) = of_results([claimed(2)], [ItemResult(error="too long")])
    assert isinstance(outcome, RetriedTask) and outcome.lane == "realtime" and outcome.counts
    assert outcome.task.failures == ("failure 0", "too long")


def test_a_call_that_failed_as_a_whole_isolates_its_items() -> None:
    broken = CallFailed("500")
    assert lanes_of(1, broken, may_isolate=True) == ["realtime.2"]
    assert lanes_of(2, broken, may_isolate=True) == ["realtime.3"]
    assert lanes_of(1, broken, may_isolate=False) == ["realtime"]


def test_a_task_whose_worker_died_is_isolated_and_at_last_a_dead_letter() -> None:
    first, last = before_call(claimed(2, failures=0), 0), before_call(claimed(4, failures=2), 0)
    assert isinstance(first, RetriedTask) and (first.lane, first.counts) == ("realtime.2", False)
    assert first.task.failures == (WORKER_DIED,)
    assert isinstance(last, EndedTask) and last.error == WORKER_DIED


def test_a_task_gets_no_try_that_begins_after_its_timeout() -> None:
    late = claimed(2)
    late = replace_task(late, arrival_ms=1000, timeout_ms=500)
    assert before_call(late, 1499) is None
    ended = before_call(late, 1500)
    assert isinstance(ended, EndedTask) and ended.result is None
    assert "timeout of 0.5 s" in ended.error and ended.task.failures == ("failure 0",)


def test_before_a_call_only_suspects_are_isolated() -> None:
    """Without a timeout, and where each try has left its failure, a task is in the call."""
    assert [before_call(claimed(attempt), 10**15) for attempt in (1, 2, 3)] == [None] * 3


def replace_task(item: ClaimedTask, **changes: int) -> ClaimedTask:
    return ClaimedTask(replace(item.task, **changes), item.fence, item.attempt)
