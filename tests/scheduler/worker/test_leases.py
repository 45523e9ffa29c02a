"""Leases while wall clocks jump: nobody requeues what a live worker holds, and what a dead one held comes back."""

from scheduler.clock import Clock
from scheduler.queue.base import Queue
from scheduler.queue.memory import MemoryQueue
from scheduler.request import Lease
from scheduler.worker.leases import LEASE_S, RENEW_S, UNRENEWED_ROUNDS, UnrenewedLeases
from tests.scheduler.queue.harness import START_MS, ManualClock, ids, lease_of, make_request


class Watcher:
    """A worker that only looks for leases that have ended, as the lease keeper does in each round."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._unrenewed = UnrenewedLeases()

    async def look(self) -> list[str]:
        return await self._queue.requeue_expired(self._unrenewed.observe(await self._queue.expired_leases(LEASE_S)))


async def claimed(queue: MemoryQueue) -> list[Lease]:
    await queue.put([make_request("a", deadline_ms=START_MS), make_request("b", deadline_ms=START_MS + 1)])
    return [lease_of(item) for item in await queue.for_worker("holder").claim({"realtime": 2}, LEASE_S)]


async def test_a_jump_of_all_clocks_takes_nothing_from_a_worker_that_renews() -> None:
    clock = ManualClock()
    queue = MemoryQueue(clock)
    leases, watcher = await claimed(queue), Watcher(queue)
    for jump_s in (15.0, 3600.0, -3600.0, -15.0):
        clock.advance(jump_s)
        for _ in range(6):
            assert await watcher.look() == []
            clock.advance(RENEW_S)
            assert await queue.renew(leases, LEASE_S) == [True, True]


async def test_a_worker_whose_clock_is_far_ahead_takes_nothing_from_one_that_renews() -> None:
    clock = ManualClock()
    queue = MemoryQueue(clock)
    leases = await claimed(queue)
    ahead = ManualClock()
    ahead.advance(600.0)
    watcher = Watcher(with_clock(queue, ahead))
    for _ in range(8):
        assert await watcher.look() == []
        for one in (clock, ahead):
            one.advance(RENEW_S)
        assert await queue.renew(leases, LEASE_S) == [True, True]


async def test_the_requests_of_a_dead_worker_come_back_whatever_the_clock_does() -> None:
    for jump_s in (0.0, 3600.0, -3600.0):
        clock = ManualClock()
        queue = MemoryQueue(clock)
        await claimed(queue)
        watcher = Watcher(queue)
        clock.advance(jump_s)
        rounds = 0
        while not (back := await watcher.look()):
            clock.advance(RENEW_S)
            rounds += 1
        assert back == ["a", "b"]
        assert rounds * RENEW_S <= LEASE_S + (UNRENEWED_ROUNDS + 1) * RENEW_S
        assert ids(await queue.for_worker("other").claim({"realtime": 2}, LEASE_S)) == ["a", "b"]


def with_clock(queue: MemoryQueue, clock: Clock) -> MemoryQueue:
    """Return a handle of the same queue on a machine with another clock."""
    other = queue.for_worker("watcher")
    other._clock = clock
    return other
