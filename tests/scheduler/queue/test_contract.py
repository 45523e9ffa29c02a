"""The contract of queues: one suite, run on the memory queue and on a real server."""

import asyncio
import math

import msgspec
import pytest

from scheduler.queue.base import Backlog, DueLimit, Queue, QueueFull, TooFarBehind
from scheduler.request import Lease, Request
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
    may_wait,
    waits,
)
from tests.waiting import until


async def requeue_expired(queue: Queue) -> list[str]:
    """Requeue at once what seems to be over; a worker waits whether somebody renews it."""
    return await queue.requeue_expired(await queue.expired_leases(LEASE_S))


async def test_a_claimed_request_equals_the_put_one(handles: Handles) -> None:
    request = make_request("a", tokens=100)
    assert await handles().put([request]) is None
    [claimed] = await handles("w").claim({"realtime": 1}, LEASE_S)
    assert claimed.request == request
    assert claimed.attempt == 1


async def test_claims_are_in_order_of_deadline_then_put(handles: Handles) -> None:
    queue = handles()
    await queue.put([make_request("z", deadline_ms=START_MS + 20), make_request("y", deadline_ms=START_MS + 20)])
    await queue.put([make_request("x", deadline_ms=START_MS + 20), make_request("late", deadline_ms=START_MS + 99)])
    await queue.put([make_request("early", deadline_ms=START_MS + 1)])
    first = await queue.claim({"realtime": 2}, LEASE_S)
    rest = await queue.claim({"realtime": 10}, LEASE_S)
    assert ids(first) + ids(rest) == ["early", "z", "y", "x", "late"]


async def test_the_head_of_each_queue_tells_when_it_arrived(handles: Handles) -> None:
    queue = handles()
    assert await queue.head_arrivals(["realtime", "bulk"]) == {}
    for number, name in enumerate(("late", "head", "last")):
        request = make_request(name, deadline_ms=START_MS + (1000, 10, 2000)[number], tokens=1000)
        await queue.put([msgspec.structs.replace(request, arrival_ms=START_MS - number)])
    assert await queue.head_arrivals(["realtime", "bulk"]) == {"realtime": START_MS - 1}
    [claimed] = await handles("w").claim({"realtime": 1}, LEASE_S)
    assert await queue.head_arrivals(["realtime"]) == {"realtime": START_MS}
    await queue.release([lease_of(claimed)])
    assert await queue.head_arrivals(["realtime"]) == {"realtime": START_MS - 1}
    await queue.cancel(["late", "head", "last"])
    assert await queue.head_arrivals(["realtime"]) == {}


async def test_claims_follow_the_order_and_the_limits_of_the_mapping(handles: Handles) -> None:
    queue = handles()
    for tier in ("realtime", "bulk", "batch"):
        await queue.put([make_request(f"{tier}-{n}", tier, START_MS + n) for n in range(3)])
    claimed = await queue.claim({"bulk": 1, "realtime": 2, "batch": 0, "unknown": 5}, LEASE_S)
    assert ids(claimed) == ["bulk-0", "realtime-0", "realtime-1"]
    assert await queue.depths(["realtime", "bulk", "batch", "unknown"]) == {
        "realtime": 1,
        "bulk": 2,
        "batch": 3,
        "unknown": 0,
    }


async def test_beyond_a_limit_what_is_due_is_claimed(handles: Handles) -> None:
    queue = handles("w")
    scores = {"a": START_MS + 9000, "b": 10, "c": 20, "d": 99}
    await queue.put([msgspec.structs.replace(make_request(name), order_ms=score) for name, score in scores.items()])

    async def claimed(limit: int, due: DueLimit) -> list[str]:
        return ids(await queue.claim({"realtime": limit}, LEASE_S, due={"realtime": due}))

    assert await claimed(0, DueLimit(4, 5)) == []
    assert await claimed(1, DueLimit(4, 20)) == ["b", "c"]
    assert await claimed(0, DueLimit(1, START_MS)) == ["d"]
    assert await claimed(0, DueLimit(4, START_MS + 10_000)) == ["a"]


async def test_a_worker_takes_its_share_while_others_wait(handles: Handles) -> None:
    queues = [await listening(handles, name) for name in "abc"]
    for queue in queues:
        assert await queue.claim({"realtime": 8}, LEASE_S, load=0) == []
    await queues[0].put([make_request(f"r{n}") for n in range(9)])
    assert await queues[0].wait_for_work(2.0), "the first of the least busy ones is woken"
    assert len(await queues[0].claim({"realtime": 8}, LEASE_S, load=0)) == 3
    assert await queues[1].wait_for_work(2.0), "and then the next"
    assert len(await queues[1].claim({"realtime": 8}, LEASE_S, load=0)) == 3
    assert len(await queues[2].claim({"realtime": 8}, LEASE_S)) == 3, "one that will not wait takes all"


@pytest.mark.parametrize(("load", "others", "share"), [(0, (4,), 7), (4, (0,), 3), (2, (0, 30), 4), (9, (0, 0), 1)])
async def test_the_share_of_a_worker_makes_all_equally_busy(
    handles: Handles, load: int, others: tuple[int, ...], share: int
) -> None:
    for name, other in (("a", 0), *((f"w{number}", other) for number, other in enumerate(others))):
        queue = await listening(handles, name)
        assert await queue.claim({"bulk": 50}, LEASE_S, load=other) == []
    await handles().put([make_request(f"b{number}", "bulk") for number in range(10)])  # it wakes the first one
    assert len(await handles("me").claim({"bulk": 50}, LEASE_S, load=load)) == share


async def test_a_repeated_put_changes_nothing(handles: Handles) -> None:
    queue = handles()
    await queue.put([make_request("a", deadline_ms=START_MS + 5), make_request("a", deadline_ms=START_MS + 9)])
    await queue.put([make_request("a", tier="bulk")])
    assert await queue.depths(["realtime", "bulk"]) == {"realtime": 1, "bulk": 0}
    [claimed] = await queue.claim({"realtime": 5}, LEASE_S)
    assert claimed.request.deadline_ms == START_MS + 5
    await queue.put([make_request("a")])
    assert await queue.claim({"realtime": 5}, LEASE_S) == []
    assert await queue.renew([lease_of(claimed)], LEASE_S) == [True]


async def test_put_is_all_or_none_against_the_limit(handles: Handles) -> None:
    queue = handles()
    await queue.put([make_request("a"), make_request("b")], limit=3)
    refused = await queue.put([make_request("c"), make_request("d")], limit=3)
    assert refused == QueueFull("realtime", depth=2, limit=3)
    assert await queue.put([make_request("c"), make_request("a")], limit=3) is None
    assert await queue.depths(["realtime"]) == {"realtime": 3}


async def test_the_bytes_that_wait_are_limited_and_counted_through_every_move(
    handles: Handles, clock: ManualClock
) -> None:
    def long(name: str) -> Request:
        return make_request(name, "bulk", deadline_ms=START_MS + ord(name), tokens=1000)

    queue, size = handles(), len(msgspec.msgpack.encode(long("a")))
    most = 2 * size
    assert await queue.put([long("a")], max_bytes=1) is None  # alone, a request of any size may wait
    assert await queue.put([long("b")], max_bytes=most) is None
    assert await queue.put([long("c")], max_bytes=most) == QueueFull("bulk", depth=2, limit=most, num_bytes=most)
    assert await queue.put([make_request("chat")], max_bytes=most) is None  # each tier has its own
    [claimed] = await handles("w").claim({"bulk": 1}, LEASE_S)
    assert await queue.put([long("c")], max_bytes=most) is None
    assert await handles("w").release([lease_of(claimed)]) == [True]
    full = QueueFull("bulk", depth=3, limit=most, num_bytes=3 * size)
    assert await queue.put([long("d")], max_bytes=most) == full
    assert await queue.cancel(["b", "c"]) == [True, True]
    assert await queue.put([long("d")], max_bytes=most) is None


async def test_a_put_of_known_requests_is_never_refused(handles: Handles) -> None:
    await handles().put([make_request("a")], limit=1)
    assert await handles().put([make_request("a")], limit=1) is None
    assert await handles().put([], limit=0) is None


@pytest.mark.trap(3)
async def test_trap_3_released_and_requeued_requests_are_exempt_from_limits(
    handles: Handles, clock: ManualClock
) -> None:
    """They return to their old place, whatever waits by then and however small the limits are."""
    queue, none = handles(), may_wait(requests=0, seconds=0)
    await queue.put([make_request(name, deadline_ms=START_MS + n) for n, name in enumerate("abc")])
    a, b, c = await handles("w").claim({"realtime": 3}, LEASE_S)
    assert await queue.put([make_request("later", deadline_ms=START_MS + 9)], limit=1, ahead=none) is None
    assert await handles("w").release([lease_of(b)]) == [True]
    clock.advance(LEASE_S)
    assert await requeue_expired(queue) == ["a", "c"]
    assert await queue.put([make_request("refused")], limit=1) == QueueFull("realtime", depth=4, limit=1)
    assert ids(await queue.claim({"realtime": 9}, LEASE_S)) == ["a", "b", "c", "later"]


@pytest.mark.trap(4)
async def test_trap_4_a_burst_does_not_exceed_the_limit_of_what_waits_ahead(handles: Handles) -> None:
    """Check and entry are one atomic move, so that simultaneous puts of any gateway see each other."""
    puts = [
        handles(f"gateway-{n}").put([make_request(f"r{n}", tokens=10)], limit=100, ahead=may_wait(seconds=35))
        for n in range(20)
    ]
    refused = [outcome for outcome in await asyncio.gather(*puts) if outcome is not None]
    assert refused == [TooFarBehind("realtime", Backlog(4, 40, 32))] * 16
    assert await handles().backlogs(["realtime"]) == {"realtime": Backlog(4, 40, 32)}


@pytest.mark.trap(15)
async def test_trap_15_each_of_n_choices_counts_with_its_tokens(handles: Handles) -> None:
    queue = handles()
    await queue.put([make_request("before", tokens=1, output=1)])
    assert await queue.put([make_request(f"r-{n}", tokens=10, output=5) for n in range(8)], limit=9) is None
    assert await queue.backlogs(["realtime"]) == {"realtime": Backlog(9, 81, 41)}
    assert await queue.put([make_request("one")], limit=9) == QueueFull("realtime", depth=9, limit=9)
    assert await queue.put([make_request("one")], ahead=may_wait(requests=8)) is not None


async def test_sums_of_waiting_requests_are_right_after_every_move(handles: Handles, clock: ManualClock) -> None:
    queue = handles()

    async def waiting() -> Backlog:
        return (await queue.backlogs(["realtime"]))["realtime"]

    await queue.put([make_request(name, tokens=2**n, output=10) for n, name in enumerate("abcde")])
    assert await waiting() == Backlog(5, 31, 50)
    a, b, c = await handles("w").claim({"realtime": 3}, LEASE_S)
    assert await waiting() == Backlog(2, 24, 20)
    await queue.release([lease_of(a)])
    assert await waiting() == Backlog(3, 25, 30)
    await queue.cancel(["b", "d"])
    assert await waiting() == Backlog(2, 17, 20)
    clock.advance(LEASE_S)
    await requeue_expired(queue)
    assert await waiting() == Backlog(3, 21, 30)
    assert ids(await queue.claim({"realtime": 9}, LEASE_S)) == ["a", "c", "e"]
    assert await waiting() == Backlog()


async def test_ahead_are_requests_due_no_later_and_the_tiers_above(handles: Handles) -> None:
    queue, none = handles(), may_wait(0, math.inf, 1, 1, "realtime")
    await queue.put([make_request(f"b{n}", "bulk", START_MS + n, tokens=10, output=3) for n in range(4)])
    await queue.put([make_request("r", "realtime", tokens=100, output=1)])
    await queue.put([make_request("x", "batch", tokens=1000)])
    late, early = make_request("late", "bulk", START_MS + 9), make_request("early", "bulk", START_MS + 1)
    assert await queue.put([late], ahead=none) == TooFarBehind("bulk", Backlog(4, 140, 13))
    assert await queue.put([early], ahead=none) == TooFarBehind("bulk", Backlog(2, 120, 7))
    assert await queue.put([early], ahead=may_wait(2, 127, 1, 1, "realtime")) is None
    assert await queue.put([late], ahead=may_wait(5, 100, 1, 1, "realtime")) is not None


async def test_ack_forgets_a_request_once(handles: Handles) -> None:
    queue = handles()
    await queue.put([make_request("a"), make_request("b")])
    a, b = await queue.claim({"realtime": 2}, LEASE_S)
    assert await queue.ack([lease_of(a), Lease("unknown", 1), lease_of(b)]) == [True, False, True]
    assert await queue.ack([lease_of(a)]) == [False]
    assert await queue.ack([]) == []
    assert await queue.put([make_request("a")]) is None, "a forgotten id may be used again"
    assert await queue.depths(["realtime"]) == {"realtime": 1}


async def test_release_returns_requests_to_their_old_place(handles: Handles) -> None:
    queue = handles()
    await queue.put([make_request(name, deadline_ms=START_MS + 7) for name in ("a", "b", "c")])
    a, b = await queue.claim({"realtime": 2}, LEASE_S)
    assert await queue.release([lease_of(b), lease_of(a), lease_of(a)]) == [True, True, False]
    again = await queue.claim({"realtime": 3}, LEASE_S)
    assert ids(again) == ["a", "b", "c"]
    assert [c.attempt for c in again] == [1, 1, 1], "a released claim is no attempt"


async def test_an_expired_lease_requeues_the_request_and_fences_its_holder(
    handles: Handles, clock: ManualClock
) -> None:
    await handles().put([make_request("a")])
    [slow] = await handles("slow").claim({"realtime": 1}, LEASE_S)
    clock.advance(LEASE_S - 0.001)
    assert await requeue_expired(handles()) == []
    clock.advance(0.001)
    assert await requeue_expired(handles()) == ["a"]
    [fast] = await handles("fast").claim({"realtime": 1}, LEASE_S)
    assert fast.attempt == 2
    assert fast.fence > slow.fence
    stale = [lease_of(slow)]
    assert await handles("slow").ack(stale) == [False]
    assert await handles("slow").renew(stale, LEASE_S) == [False]
    assert await handles("slow").release(stale) == [False]
    assert await handles("fast").ack([lease_of(fast)]) == [True]


async def test_renew_moves_the_expiry(handles: Handles, clock: ManualClock) -> None:
    queue = handles()
    await queue.put([make_request("a"), make_request("b")])
    a, _ = await queue.claim({"realtime": 2}, LEASE_S)
    clock.advance(LEASE_S / 2)
    assert await queue.renew([lease_of(a), Lease("unknown", 3)], LEASE_S) == [True, False]
    clock.advance(LEASE_S / 2)
    assert await requeue_expired(queue) == ["b"]
    clock.advance(LEASE_S / 2)
    assert await requeue_expired(queue) == ["a"]


async def test_a_lease_that_was_renewed_meanwhile_is_not_requeued(handles: Handles, clock: ManualClock) -> None:
    queue = handles()
    await queue.put([make_request("a"), make_request("b")])
    a, b = await queue.claim({"realtime": 2}, LEASE_S)
    clock.advance(3600)
    seen = await queue.expired_leases(LEASE_S)
    assert sorted(seen) == ["a", "b"]
    await queue.renew([lease_of(a)], LEASE_S)
    assert await queue.requeue_expired(seen) == ["b"]
    assert await queue.ack([lease_of(a), lease_of(b)]) == [True, False]


async def test_a_lease_seems_to_be_over_when_the_clock_was_set_back(handles: Handles, clock: ManualClock) -> None:
    """Otherwise the requests of a dead worker would wait until the clock has caught up."""
    queue = handles()
    await queue.put([make_request("a")])
    await queue.claim({"realtime": 1}, LEASE_S)
    assert await queue.expired_leases(LEASE_S) == {}
    clock.advance(-3600)
    assert list(await queue.expired_leases(LEASE_S)) == ["a"]


async def test_cancel_of_waiting_leased_and_unknown_requests(handles: Handles) -> None:
    worker = await listening(handles, "w")
    await handles().put([make_request("leased")])
    [leased] = await worker.claim({"realtime": 1}, LEASE_S)
    await handles().put([make_request("waiting")])
    assert await handles().cancel(["waiting", "leased", "unknown"]) == [True, True, False]
    assert await handles().cancel([]) == []
    assert await worker.claim({"realtime": 5}, LEASE_S) == []
    assert await worker.renew([lease_of(leased)], LEASE_S) == [False]
    assert await worker.ack([lease_of(leased)]) == [False]
    assert await handles().depths(["realtime"]) == {"realtime": 0}


async def test_waiting_and_leased_requests_are_known(handles: Handles) -> None:
    queue = handles()
    await queue.put([make_request(name) for name in ("done", "leased", "waiting", "cancelled")])
    done, _ = await queue.claim({"realtime": 2}, LEASE_S)
    await queue.ack([lease_of(done)])
    await queue.cancel(["cancelled"])
    names = ["done", "leased", "waiting", "cancelled", "never put"]
    assert await queue.known(names) == [False, True, True, False, False]
    assert await queue.known([]) == []


async def test_a_worker_learns_once_of_each_request_cancelled_under_its_lease(handles: Handles) -> None:
    worker = await listening(handles, "w#1")
    await handles().put([make_request("a"), make_request("b")])
    await worker.claim({"realtime": 2}, LEASE_S)
    await handles().cancel(["a", "b"])
    assert await worker.wait_for_work(30.0) is True
    heard: list[str] = []

    def heard_both() -> bool:
        heard.extend(worker.cancelled())
        return len(heard) >= 2

    await until(heard_both)
    assert heard == ["a", "b"]
    assert worker.cancelled() == []


@pytest.mark.parametrize("cause", ["put", "release", "requeue"])
async def test_wait_for_work_ends_at_once_when_there_is_a_request_of_a_tier_that_the_worker_waits_for(
    handles: Handles, clock: ManualClock, cause: str
) -> None:
    other = handles("other")
    await other.put([make_request("a")])
    [claimed] = await other.claim({"realtime": 1}, LEASE_S)
    waiting = asyncio.create_task((await waits(handles, "waiter")).wait_for_work(30.0))
    await asyncio.sleep(0)
    match cause:
        case "put":
            await other.put([make_request("b", "bulk")])
        case "release":
            await other.release([lease_of(claimed)])
        case "requeue":
            clock.advance(LEASE_S)
            await requeue_expired(other)
    async with asyncio.timeout(30):
        assert await waiting is True


async def test_the_least_busy_worker_that_waits_is_woken_and_only_this_one(
    handles: Handles, clock: ManualClock
) -> None:
    workers = [await waits(handles, f"w{load}#1", load) for load in (0, 1, 2)]
    for n, worker in enumerate(workers):
        await handles().put([make_request(f"r{n}")])
        assert await worker.wait_for_work(30.0) is True
        assert [await other.wait_for_work(0.0) for other in workers] == [False] * 3
        clock.advance(0.01)


async def test_puts_within_a_moment_wake_one_worker_which_claims_them_all(handles: Handles, clock: ManualClock) -> None:
    first, second = await waits(handles, "w1"), await waits(handles, "w2")
    for name in "ab":
        await handles().put([make_request(name)])
    assert await first.wait_for_work(30.0) is True
    assert await second.wait_for_work(0.0) is False
    clock.advance(0.01)  # for this time, the first worker does not react
    await handles().put([make_request("c")])
    assert await second.wait_for_work(30.0) is True
    assert ids(await second.claim({"realtime": 5}, LEASE_S, 0)) == ["a", "b", "c"]
    await handles().put([make_request("d")])
    assert await second.wait_for_work(30.0) is True, "its claim has left nothing"


async def test_a_claim_that_leaves_requests_wakes_the_next_worker(handles: Handles) -> None:
    first, second = await waits(handles, "w1"), await waits(handles, "w2")
    await handles().put([make_request(name) for name in "abc"])
    assert await first.wait_for_work(30.0) is True
    assert ids(await first.claim({"realtime": 2}, LEASE_S, 0)) == ["a", "b"]
    assert await second.wait_for_work(30.0) is True
    assert ids(await second.claim({"realtime": 2}, LEASE_S, 0)) == ["c"]
    assert await first.wait_for_work(0.0) is False, "it has no room"


async def test_a_worker_that_has_no_room_any_more_leaves_the_request_to_the_next_one(handles: Handles) -> None:
    first, second = await waits(handles, "w1"), await waits(handles, "w2")
    await handles().put([make_request("a")])
    assert await first.wait_for_work(30.0) is True
    assert await first.claim({"realtime": 0, "bulk": 1}, LEASE_S, 0) == []
    assert await second.wait_for_work(30.0) is True
    assert ids(await second.claim({"realtime": 1}, LEASE_S, 0)) == ["a"]
    await handles().put([make_request("b")])
    assert await first.wait_for_work(0.0) is False, "it waits for bulk only"


async def test_a_worker_that_has_ended_is_not_waited_for(handles: Handles) -> None:
    ended, alive = await waits(handles, "w1"), await waits(handles, "w2")
    await ended.close()
    if handles.client is not None:
        await until(lambda: has_left(handles, "w1"))
    await handles().put([make_request("a")])
    assert await alive.wait_for_work(30.0) is True


async def test_wait_for_work_ends_after_its_timeout(handles: Handles) -> None:
    worker = await listening(handles, "w")
    assert await worker.wait_for_work(0.01) is False
    assert await worker.wait_for_work(0.0) is False


async def test_idle_workers_are_those_that_wait_and_hold_nothing(handles: Handles) -> None:
    first, second, third = await listening(handles, "first"), handles("second"), handles("third")
    await first.claim({"bulk": 4, "realtime": 4}, LEASE_S, load=0)
    await second.claim({"bulk": 4}, LEASE_S, load=3)
    assert await third.idle_workers(["bulk", "realtime", "batch"]) == {"bulk": 1, "realtime": 1, "batch": 0}
    await third.put([make_request("b", "bulk")])
    assert await third.idle_workers(["bulk"]) == {"bulk": 0}, "it was woken"
