"""Tasks in the store: what they can become, who may end them, and what is kept of them."""

from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.asyncio import Redis

from scheduler.queue.base import QueueFull
from scheduler.request import Lease
from scheduler.store import keys
from scheduler.store.keys import Keys
from scheduler.tasks.queue import TaskQueue, TooManyBytes
from scheduler.tasks.task import (
    MAX_TRIES,
    ClaimedTask,
    EndedTask,
    LaneDepth,
    RetriedTask,
    StoredTask,
    Task,
    TaskState,
    group_size,
    isolated_lane,
    isolated_lanes,
    tier_of,
)
from tests.scheduler.queue.harness import ManualClock
from tests.scheduler.tasks.builders import make_task

LEASE_S = 10.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def queue(redis_client: Redis, clock: ManualClock) -> AsyncIterator[TaskQueue]:
    queue = TaskQueue(redis_client, clock, "w1")
    yield queue
    await queue.close()


async def found(queue: TaskQueue, task: Task) -> StoredTask:
    stored = (await queue.find([task.id]))[0]
    assert stored is not None
    return stored


async def put_and_claim(queue: TaskQueue, tasks: Sequence[Task]) -> list[ClaimedTask]:
    for task in tasks:
        await queue.put([task], limit=100)
    return await queue.claim({task.tier: 100 for task in tasks}, LEASE_S)


def dead(claimed: ClaimedTask, reason: str = "no luck") -> EndedTask:
    return EndedTask(claimed, replace(claimed.task, failures=(reason,)), None, reason)


async def test_a_task_goes_from_queued_over_running_to_done(
    queue: TaskQueue, redis_client: Redis, clock: ManualClock
) -> None:
    task = make_task(b'{"a":1}', metadata={"run": "7"}, keep_ms=5000)
    await queue.put([task], limit=10)
    head = replace(task, input=b"")
    assert await found(queue, task) == StoredTask(head, TaskState.QUEUED, 0)
    (claimed,) = await queue.claim({"realtime": 5}, LEASE_S)
    assert claimed.task == task
    assert await found(queue, task) == StoredTask(head, TaskState.RUNNING, 1)
    assert await queue.end([EndedTask(claimed, task, b"[2]")]) == [True]
    assert await found(queue, task) == StoredTask(head, TaskState.DONE, 1, clock.wall_ms(), b"[2]")
    assert 0 < await redis_client.pttl(Keys.of(redis_client).tasks.ended + task.id) <= 5000
    left = {key.decode() for key in await redis_client.keys("*")}
    assert left == {
        Keys.of(redis_client).tasks.ended + task.id,
        *(f"{Keys.of(redis_client).tasks.prefix}{k}" for k in ("sequence", "epoch", "claim:w1")),
    }


async def test_a_full_queue_takes_none_of_a_list(queue: TaskQueue) -> None:
    await queue.put([make_task() for _ in range(8)], limit=10)
    refused = await queue.put([make_task() for _ in range(3)], limit=10)
    assert refused == QueueFull("realtime", 8, 10)
    assert await queue.put([make_task() for _ in range(2)], limit=10) is None


async def test_the_oldest_of_a_lane_come_first_and_lanes_in_the_given_order(queue: TaskQueue) -> None:
    tasks = [make_task(tier=tier, arrival_ms=ms) for tier, ms in (("bulk", 1), ("realtime", 9), ("realtime", 5))]
    for task in tasks:
        await queue.put([task], limit=10)
    depths = await queue.depths(["realtime", "bulk", "batch"])
    assert depths == {"realtime": LaneDepth(2, 5), "bulk": LaneDepth(1, 1), "batch": LaneDepth()}
    claimed = await queue.claim({"realtime": 2, "bulk": 2}, LEASE_S)
    assert [c.task.id for c in claimed] == [tasks[2].id, tasks[1].id, tasks[0].id]


async def test_a_retried_task_waits_in_its_lane_at_its_old_place(queue: TaskQueue) -> None:
    (claimed,) = await put_and_claim(queue, [make_task(arrival_ms=5)])
    failed = replace(claimed.task, failures=("once",))
    lane = isolated_lane("realtime", 2)
    assert await queue.retry([RetriedTask(claimed, failed, lane)]) == [True]
    assert await queue.depths([lane, "realtime"]) == {lane: LaneDepth(1, 5), "realtime": LaneDepth()}
    (again,) = await queue.claim({lane: 8}, LEASE_S)
    assert (again.attempt, again.task.failures) == (2, ("once",))


async def test_a_claim_that_is_no_try_does_not_count(queue: TaskQueue) -> None:
    (claimed,) = await put_and_claim(queue, [make_task()])
    await queue.release([Lease(claimed.task.id, claimed.fence)])
    (again,) = await queue.claim({"realtime": 1}, LEASE_S)
    await queue.retry([RetriedTask(again, again.task, "realtime", counts=False)])
    (third,) = await queue.claim({"realtime": 1}, LEASE_S)
    assert third.attempt == 1


async def test_only_the_last_holder_ends_a_task(queue: TaskQueue, redis_client: Redis, clock: ManualClock) -> None:
    (first,) = await put_and_claim(queue, [make_task()])
    clock.advance(LEASE_S + 1)
    assert await queue.requeue_expired(await queue.expired_leases(LEASE_S)) == [first.task.id]
    other = TaskQueue(redis_client, clock, "w2")
    (second,) = await other.claim({"realtime": 1}, LEASE_S)
    assert await queue.end([EndedTask(first, first.task, b'"late"')]) == [False]
    assert await queue.retry([RetriedTask(first, first.task, "realtime")]) == [False]
    assert await other.end([EndedTask(second, second.task, b'"right"')]) == [True]
    assert (await found(queue, first.task)).result == b'"right"'


async def test_tasks_of_a_dead_worker_return_and_their_tries_count(queue: TaskQueue, redis_client: Redis) -> None:
    (claimed,) = await put_and_claim(queue, [make_task()])
    assert await queue.requeue_worker("w1") == [claimed.task.id]
    (again,) = await queue.claim({"realtime": 1}, LEASE_S)
    assert again.attempt == 2


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_cancelled_task_stays_cancelled(queue: TaskQueue, is_running: bool) -> None:
    task = make_task()
    await queue.put([task], limit=10)
    claimed = await queue.claim({"realtime": 1}, LEASE_S) if is_running else []
    assert await queue.cancel(task)
    assert (await found(queue, task)).state is TaskState.CANCELLED
    assert await queue.end([EndedTask(c, task, b"1") for c in claimed]) == [False] * len(claimed)
    assert await queue.claim({"realtime": 1}, LEASE_S) == []
    assert not await queue.cancel(task)


async def test_dead_letters_are_listed_newest_first_for_their_owner(queue: TaskQueue, clock: ManualClock) -> None:
    tasks = [make_task(owner="ann") for _ in range(3)] + [make_task(owner="ben")]
    for claimed in await put_and_claim(queue, tasks):
        await queue.end([dead(claimed)])
        clock.advance(1)
    listed = await queue.dead("ann", limit=2)
    assert listed is not None and [s.task.id for s in listed] == [tasks[2].id, tasks[1].id]
    assert listed[0].error == "no luck" and listed[0].state is TaskState.DEAD
    rest = await queue.dead("ann", limit=2, after=tasks[1].id)
    assert rest is not None and [s.task.id for s in rest] == [tasks[0].id]
    assert await queue.dead("ann", limit=2, after=tasks[3].id) is None


async def test_a_revived_dead_letter_has_all_its_tries_again(queue: TaskQueue) -> None:
    (claimed,) = await put_and_claim(queue, [make_task()])
    await queue.end([dead(claimed)])
    assert await queue.revive(claimed.task)
    assert not await queue.revive(claimed.task)
    (again,) = await queue.claim({"realtime": 1}, LEASE_S)
    assert (again.attempt, again.task.failures, again.task.id) == (1, (), claimed.task.id)
    assert again.task.input == claimed.task.input
    assert await queue.dead("", limit=10) == []


async def test_only_so_many_dead_letters_are_kept(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_DEAD", 2)
    claimed = await put_and_claim(queue, [make_task() for _ in range(4)])
    await queue.end([dead(c) for c in claimed])
    assert len(await queue.dead("", limit=10) or []) == 2
    assert len([s for s in await queue.find([c.task.id for c in claimed]) if s is not None]) == 2


async def test_the_oldest_dead_letters_go_when_all_have_too_many_bytes(
    queue: TaskQueue, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MAX_DEAD_BYTES", 2_500)
    tasks = [make_task(b"7" * 1000, owner=owner) for owner in ("ann", "ann", "ben", "ann")]
    for claimed in await put_and_claim(queue, tasks):
        await queue.end([dead(claimed)])
        clock.advance(1)
    kept = [stored is not None for stored in await queue.find([task.id for task in tasks])]
    assert kept == [False, True, True, True]
    assert await queue.revive(replace(tasks[1], failures=("no luck",)))
    (claimed,) = await queue.claim({"realtime": 1}, LEASE_S)
    assert claimed.task.input == tasks[1].input
    await queue.end([dead(claimed)])
    listed = await queue.dead("ann", limit=10)
    assert listed is not None and [s.task.id for s in listed] == [tasks[1].id, tasks[3].id], (
        "a revived one is not counted"
    )


async def test_one_owner_does_not_fill_the_store(redis_client: Redis, clock: ManualClock) -> None:
    queue = TaskQueue(redis_client, clock, "w1", max_bytes=5000)
    assert await queue.put([make_task(b"1" * 2000, owner="ann") for _ in range(2)], 100) is None
    refused = await queue.put([make_task(b"1", owner="ann"), make_task(b"1" * 2000, owner="ann")], 100)
    assert isinstance(refused, TooManyBytes) and 4000 < refused.held < 5000 == refused.limit
    assert len(await queue.claim({"realtime": 100}, LEASE_S)) == 2, "none of a list"
    assert await queue.put([make_task(b"1" * 2000, owner="ben")], 100) is None


@pytest.mark.parametrize("end", ["done", "dead", "cancelled", "expired", "lost"])
async def test_whatever_ends_a_task_frees_its_bytes(
    queue: TaskQueue, redis_client: Redis, clock: ManualClock, end: str
) -> None:
    task = make_task(b"1" * 2000, owner="ann", timeout_ms=1)
    await queue.put([task], 100)
    held = await redis_client.hget(Keys.of(redis_client).tasks.bytes, "ann")  # type: ignore[misc]
    assert held is not None and int(held) > 2000
    claimed = [] if end == "expired" else await queue.claim({"realtime": 1}, LEASE_S)
    if end == "lost":
        await queue.requeue_worker("w1")
        claimed = await queue.claim({"realtime": 1}, LEASE_S)
        await queue.retry([RetriedTask(c, replace(c.task, failures=("no luck",)), "realtime") for c in claimed])
        claimed = await queue.claim({"realtime": 1}, LEASE_S)
        assert claimed[0].task.input == task.input
    if end in ("done", "lost"):
        await queue.end([EndedTask(c, c.task, b"[2]") for c in claimed])
    elif end == "dead":
        await queue.end([dead(c) for c in claimed])
    elif end == "cancelled":
        await queue.cancel(task)
    else:
        await queue.expire([task])
    assert await redis_client.hgetall(Keys.of(redis_client).tasks.bytes) == {}  # type: ignore[misc]
    kept = await redis_client.hstrlen(Keys.of(redis_client).tasks.ended + task.id, "input")  # type: ignore[misc]
    assert kept == (2000 if end in ("dead", "expired") else 0)


@given(st.integers(1, 4096))
def test_groups_shrink_from_the_whole_batch_to_one(batch: int) -> None:
    sizes = [group_size(lane, batch) for lane in ("bulk", *reversed(isolated_lanes("bulk")))]
    assert sizes[0] == batch and sizes[-1] == 1 and len(sizes) == MAX_TRIES
    assert sizes == sorted(sizes, reverse=True)


def test_a_lane_knows_its_tier() -> None:
    assert [tier_of(lane) for lane in ("bulk", "bulk.2")] == ["bulk", "bulk"]


async def test_expiring_ends_what_waits_and_lets_go_on_what_runs(
    queue: TaskQueue, redis_client: Redis, clock: ManualClock
) -> None:
    running, waiting = (make_task(arrival_ms=ms, timeout_ms=1, owner="ann") for ms in (1, 2))
    await queue.put([running, waiting], limit=10)
    (claimed,) = await queue.claim({"realtime": 1}, LEASE_S)
    await queue.expire([running, waiting])
    assert (await found(queue, running)).state is TaskState.RUNNING
    stored = await found(queue, waiting)
    assert (stored.state, stored.attempts, stored.ended_ms) == (TaskState.DEAD, 0, clock.wall_ms())
    assert stored.error == waiting.timeout_error
    assert await queue.dead("ann", 10) == [stored]
    assert await queue.claim({"realtime": 1}, LEASE_S) == []
    assert await queue.end([EndedTask(claimed, claimed.task, b"1")]) == [True]
    await queue.expire([running, waiting])
    assert (await found(queue, running)).state is TaskState.DONE, "an end is final"
    left = {key.decode() for key in await redis_client.keys(Keys.of(redis_client).tasks.queue + "*")}
    assert not left


async def test_a_task_that_waits_for_another_try_expires_with_its_failures(queue: TaskQueue) -> None:
    task = make_task(timeout_ms=1)
    (claimed,) = await put_and_claim(queue, [task])
    tried = replace(task, failures=("no luck",))
    await queue.retry([RetriedTask(claimed, tried, isolated_lane(task.tier, 2))])
    await queue.expire([task])
    stored = await found(queue, task)
    assert (stored.state, stored.attempts, stored.task.failures) == (TaskState.DEAD, 1, ("no luck",))
