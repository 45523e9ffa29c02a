"""What a worker leaves in the queue before it dies: checkpoints, and who can be blamed. Both queues pass."""

import pytest

from scheduler.queue.base import Queue
from scheduler.request import Checkpoint, Claimed, Lease
from tests.scheduler.queue.harness import Handles, ids, lease_of, make_request

LEASE_S = 10.0


async def claim(queue: Queue, count: int = 9) -> list[Claimed]:
    return await queue.claim({"realtime": count}, LEASE_S)


async def claimed(handles: Handles, *names: str) -> list[Claimed]:
    await handles().put([make_request(name) for name in names])
    return await claim(handles("w1"))


def attempts(claimed: list[Claimed]) -> dict[str, int]:
    return {c.request.id: c.attempt for c in claimed}


# -- checkpoints -------------------------------------------------------------------------------------------------------


async def test_the_next_claim_gets_what_was_checkpointed(handles: Handles) -> None:
    a, b = await claimed(handles, "a", "b")
    assert a.output_token_ids == ()
    queue = handles("w1")
    first = [Checkpoint(lease_of(a), 0, (5, 2**32 - 1)), Checkpoint(lease_of(b), 0, (1,))]
    assert await queue.checkpoint(first) == [2, 1]
    assert await queue.checkpoint([Checkpoint(lease_of(a), 2, (7,))]) == [3]
    await handles("w2").requeue_worker("w1")
    assert {c.request.id: c.output_token_ids for c in await claim(handles("w2"))} == {
        "a": (5, 2**32 - 1, 7),
        "b": (1,),
    }


async def test_a_checkpoint_survives_a_release(handles: Handles) -> None:
    [a] = await claimed(handles, "a")
    await handles("w1").checkpoint([Checkpoint(lease_of(a), 0, (4, 4))])
    await handles("w1").release([lease_of(a)])
    assert [c.output_token_ids for c in await claim(handles("w2"))] == [(4, 4)]


async def test_only_the_holder_of_the_lease_writes(handles: Handles) -> None:
    [old] = await claimed(handles, "a")
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 0, (1, 2))]) == [2]
    await handles("w2").requeue_worker("w1")
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 2, (3,))]) == [-1], "it waits"
    [new] = await claim(handles("w2"))
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 2, (3,))]) == [-1], "another worker has it"
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 0, (9,))]) == [-1]
    assert new.output_token_ids == (1, 2)
    await handles("w2").release([lease_of(new)])
    assert [c.output_token_ids for c in await claim(handles("w2"))] == [(1, 2)]


async def test_no_checkpoint_mixes_two_generations(handles: Handles) -> None:
    [a] = await claimed(handles, "a")
    queue = handles("w1")
    assert await queue.checkpoint([Checkpoint(lease_of(a), 0, (1, 2, 3))]) == [3]
    assert await queue.checkpoint([Checkpoint(lease_of(a), 5, (9,))]) == [3], "a gap"
    assert await queue.checkpoint([Checkpoint(lease_of(a), 1, (9, 9, 9))]) == [3], "an overlap"
    assert await queue.checkpoint([Checkpoint(lease_of(a), 0, (7,))]) == [1], "a new begin replaces everything"
    assert await queue.checkpoint([Checkpoint(lease_of(a), 1, (8,))]) == [2]
    assert await queue.checkpoint([Checkpoint(lease_of(a), 1, (8,))]) == [2], "a repeated write changes nothing"


@pytest.mark.parametrize("end", ["ack", "cancel"])
async def test_the_checkpoint_goes_with_its_request(handles: Handles, end: str) -> None:
    [a] = await claimed(handles, "a")
    await handles("w1").checkpoint([Checkpoint(lease_of(a), 0, (1,))])
    await (handles().ack([lease_of(a)]) if end == "ack" else handles().cancel(["a"]))
    assert await handles("w1").checkpoint([Checkpoint(lease_of(a), 0, (1,))]) == [-1]
    [again] = await claimed(handles, "a")
    assert again.output_token_ids == ()


# -- who is blamed for a death -----------------------------------------------------------------------------------------


async def die(handles: Handles, way: str, worker: str = "w1") -> None:
    """Give back the requests of a dead worker, as another worker does it."""
    queue = handles("other")
    if way == "silence":
        await queue.requeue_worker(worker)
    else:
        handles.clock.advance(LEASE_S + 1)  # type: ignore[attr-defined]
        await queue.requeue_expired(await queue.expired_leases(LEASE_S))


@pytest.mark.parametrize("way", ["silence", "expiry"])
async def test_a_death_counts_for_all_but_those_that_wait(handles: Handles, way: str) -> None:
    a, b, c = await claimed(handles, "a", "b", "c")
    await handles("w1").note_step({lease_of(b): True, lease_of(c): True}, None)
    await handles("w1").note_step({lease_of(c): False}, None)
    await die(handles, way)
    assert attempts(await claim(handles("w2"))) == {"a": 2, "b": 1, "c": 2}


@pytest.mark.parametrize("way", ["silence", "expiry"])
async def test_a_death_counts_only_for_the_request_that_ran_alone(handles: Handles, way: str) -> None:
    a, b, c = await claimed(handles, "a", "b", "c")
    await handles("w1").note_step({lease_of(c): True}, lease_of(b))
    await die(handles, way)
    assert attempts(await claim(handles("w2"))) == {"a": 1, "b": 2, "c": 1}


async def test_after_a_step_alone_the_next_death_counts_for_others_too(handles: Handles) -> None:
    a, b = await claimed(handles, "a", "b")
    await handles("w1").note_step({lease_of(b): False}, lease_of(b))
    await handles("w1").note_step({lease_of(b): True}, None)
    await die(handles, "silence")
    assert attempts(await claim(handles("w2"))) == {"a": 2, "b": 1}


async def test_marks_concern_one_claim_of_one_worker(handles: Handles) -> None:
    a, b = await claimed(handles, "a", "b")
    await handles("w1").note_step({lease_of(a): True}, lease_of(b))
    await die(handles, "silence")
    again = await claim(handles("w2"))
    assert attempts(again) == {"a": 1, "b": 2}
    await handles("w1").note_step({lease_of(c): True for c in (a, b)}, None)  # it only seemed dead
    await die(handles, "silence", "w2")
    assert attempts(await claim(handles("w1"))) == {"a": 2, "b": 3}


async def test_a_mark_of_a_lost_lease_has_no_effect(handles: Handles) -> None:
    [a] = await claimed(handles, "a")
    await handles("w1").note_step({Lease("a", a.fence + 1): True, Lease("unknown", 1): True}, None)
    await die(handles, "silence")
    found = await claim(handles("w2"))
    assert (ids(found), attempts(found)) == (["a"], {"a": 2})
