"""Which worker claims a request for which a put has preferred one: part of the contract of queues."""

from scheduler.queue.base import DueLimit, Preference, Queue
from tests.scheduler.queue.harness import (
    LEASE_S,
    START_MS,
    Handles,
    ManualClock,
    has_left,
    ids,
    lease_of,
    listening,
    make_request,
    waits,
)
from tests.waiting import until

UNTIL_MS = START_MS + 100


def prefer(*workers: str, slack: int = 1) -> Preference:
    return Preference(workers, slack, UNTIL_MS)


async def claim(worker: Queue, limit: int = 4, load: int = 0, **due: DueLimit) -> list[str]:
    return ids(await worker.claim({"realtime": limit, "bulk": 1}, LEASE_S, load, due))


async def test_a_preferred_worker_is_woken_and_others_leave_it_the_request(handles: Handles) -> None:
    idle, preferred = await waits(handles, "w1", 0), await waits(handles, "w2#1", 1)
    await handles().put([make_request("a", deadline_ms=START_MS)], prefer=prefer("w2"))
    assert await preferred.wait_for_work(30.0) is True
    assert await idle.wait_for_work(0.0) is False
    await handles().put([make_request("b"), make_request("c")])
    due = {"realtime": DueLimit(2, START_MS + 1000)}
    assert await claim(idle, 1, **due) == ["b", "c"], "it passes the one that is due before"
    assert await claim(preferred, 4, 1) == ["a"]


async def test_what_is_left_goes_to_all_when_the_time_is_over(handles: Handles, clock: ManualClock) -> None:
    idle, _ = await waits(handles, "w1"), await waits(handles, "w2")
    await handles().put([make_request("a")], prefer=prefer("w2"))
    assert await claim(idle) == []
    clock.advance(0.1)
    assert await claim(idle) == ["a"]


async def test_the_least_busy_of_the_preferred_workers_is_woken(handles: Handles) -> None:
    workers = [await waits(handles, f"w{load}", load) for load in (0, 1, 2)]
    await handles().put([make_request("a")], prefer=prefer("w2", "gone", "w1", slack=2))
    assert await workers[1].wait_for_work(30.0) is True
    assert await claim(workers[0]) == await claim(workers[2]) == []
    assert await claim(workers[1]) == ["a"]


async def test_no_worker_is_preferred_that_is_too_busy_or_does_not_wait(handles: Handles, clock: ManualClock) -> None:
    idle, busy = await waits(handles, "w1"), await waits(handles, "w2", 2)
    for n in range(2):
        await handles().put([make_request(f"r{n}")], prefer=prefer("w2", "w3"))
        assert await idle.wait_for_work(30.0) is True
        assert await claim(idle) == [f"r{n}"]
        assert await claim(busy, 0, 2) == [], "the second time, it waits for bulk only"
        clock.advance(0.01)


async def test_a_worker_that_is_about_to_claim_counts_as_busy_with_what_is_left_to_it(
    handles: Handles, clock: ManualClock
) -> None:
    idle, preferred = await waits(handles, "w1"), await waits(handles, "w2", 1)
    for name in "abc":
        await handles().put([make_request(name)], prefer=prefer("w2", slack=2))
    assert await idle.wait_for_work(30.0) is True
    assert await claim(idle) == ["c"]
    assert await claim(preferred, 4, 1) == ["a", "b"]
    await handles().put([make_request("d")], prefer=prefer("w2", slack=2))
    assert await preferred.wait_for_work(30.0) is True
    clock.advance(0.1)  # for this time, it has not reacted
    await handles().put([make_request("e")], prefer=prefer("w2", slack=9))
    assert await claim(idle) == ["d", "e"]


async def test_where_nobody_waits_a_worker_that_is_about_to_claim_gets_up_to_the_slack(handles: Handles) -> None:
    preferred, other = await waits(handles, "w1"), await listening(handles, "w2")
    for name in "abc":
        await handles().put([make_request(name)], prefer=prefer("w1", slack=1))
    assert await claim(other) == ["c"]
    assert await claim(preferred) == ["a", "b"]


async def test_a_preferred_worker_that_has_ended_is_not_waited_for(handles: Handles) -> None:
    alive, ended = await waits(handles, "w1"), await waits(handles, "w2")
    await ended.close()
    if handles.client is not None:
        await until(lambda: has_left(handles, "w2"))
    await handles().put([make_request("a")], prefer=prefer("w2"))
    assert await alive.wait_for_work(30.0) is True
    assert await claim(alive) == ["a"]


async def test_a_preferred_worker_without_room_leaves_the_request_to_the_next_one(handles: Handles) -> None:
    idle, preferred = await waits(handles, "w1"), await waits(handles, "w2")
    await handles().put([make_request("a")], prefer=prefer("w2"))
    assert ids(await preferred.claim({"bulk": 1}, LEASE_S, 0)) == []
    assert await claim(idle) == [], "this was no claim of its tier"
    assert await claim(preferred, 0) == []
    assert await idle.wait_for_work(30.0) is True
    assert await claim(idle) == ["a"]


async def test_a_worker_takes_what_is_left_to_it_beside_its_share(handles: Handles) -> None:
    first, preferred, _ = [await waits(handles, name) for name in ("w1", "w2", "w3")]
    await handles().put([make_request("before", deadline_ms=START_MS)])
    await handles().put([make_request("a")], prefer=prefer("w2"))
    assert await first.wait_for_work(30.0) is True
    assert await claim(preferred) == ["before", "a"]


async def test_others_take_their_shares_of_the_rest_only(handles: Handles) -> None:
    first, preferred, third = [await waits(handles, name) for name in ("w1", "w2", "w3")]
    await handles().put([make_request("a"), make_request("b")], prefer=prefer("w2"))
    await handles().put([make_request("c"), make_request("d")])
    assert await first.wait_for_work(30.0) is True
    assert await claim(first) == ["c"]
    assert await third.wait_for_work(30.0) is True
    assert await claim(third) == ["d"]
    assert await first.wait_for_work(0.0) is False, "the rest is left to another"
    assert await claim(preferred) == ["a", "b"]


async def test_a_request_that_comes_back_is_left_to_nobody(handles: Handles) -> None:
    idle, preferred = await waits(handles, "w1"), await waits(handles, "w2")
    await handles().put([make_request("a"), make_request("gone")], prefer=prefer("w2"))
    await handles().cancel(["gone"])
    [claimed] = await preferred.claim({"realtime": 4}, LEASE_S)
    await preferred.release([lease_of(claimed)])
    await handles().put([make_request("gone")])
    assert await claim(idle) == ["a", "gone"]
