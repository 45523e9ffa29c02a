"""What a worker leaves in the queue before it dies: checkpoints, and who can be blamed. Both queues pass."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.asyncio import Redis

from scheduler.queue.base import Queue
from scheduler.request import Checkpoint, Claimed, Lease
from scheduler.store import connection, keys
from scheduler.store.keys import Keys
from tests.scheduler.queue.harness import Handles, ManualClock, lease_of, make_request
from tests.stores import Store

LEASE_S = 10.0


async def claim(queue: Queue, count: int = 9) -> list[Claimed]:
    return await queue.claim({"realtime": count}, LEASE_S)


async def claimed(handles: Handles, *names: str) -> list[Claimed]:
    await handles().put([make_request(name) for name in names])
    return await claim(handles("w1"))


def attempts(claimed: list[Claimed]) -> dict[str, int]:
    return {c.request.id: c.attempt for c in claimed}


async def test_a_worker_id_stands_for_all_its_incarnations_and_one_of_them_only_for_itself(handles: Handles) -> None:
    await handles().put([make_request(name) for name in "abc"])
    [a] = await claim(handles("w#1"), 1)
    [b] = await claim(handles("w#2"), 1)
    [c] = await claim(handles("w2"), 1)
    await handles("w#1").note_step({}, lease_of(a))
    assert await handles().requeue_worker("w#2") == ["b"]
    assert await handles().renew([lease_of(x) for x in (a, b, c)], LEASE_S) == [True, False, True]
    await claim(handles("w#2"), 1)
    assert sorted(await handles().requeue_worker("w")) == ["a", "b"]
    assert await handles().renew([lease_of(c)], LEASE_S) == [True]
    assert attempts(await claim(handles("w#3"))) == {"a": 2, "b": 3}


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


async def test_the_next_claim_continues_from_what_the_gateway_has_received(handles: Handles) -> None:
    [first] = await claimed(handles, "a")
    assert first.num_received == 0
    await handles("w1").checkpoint([Checkpoint(lease_of(first), 0, (1, 2, 3))])
    await handles("w2").requeue_worker("w1")
    [second] = await claim(handles("w2"))
    assert (second.attempt, second.num_received) == (2, None), "nobody has told it"
    assert await handles().resume([Checkpoint(lease_of(first), 0, (9,))]) == [False], "another worker has it"
    assert await handles().resume([Checkpoint(lease_of(second), 0, (1, 2, 8, 9))]) == [True]
    [third] = await claim(handles("w1"))
    assert (third.attempt, third.num_received, third.output_token_ids) == (2, 4, (1, 2, 8, 9))
    await handles("w1").release([lease_of(third)])
    assert [c.num_received for c in await claim(handles("w1"))] == [None]


async def test_what_a_gateway_has_received_of_an_older_request_is_not_the_output_of_a_part(handles: Handles) -> None:
    older = await claimed_part(handles, "older")
    newer = await claimed_part(handles, "newer", "w2")
    await handles("w2").checkpoint([Checkpoint(lease_of(newer), 0, (7,))])
    await handles("w2").requeue_worker("w1")
    [older] = await claim(handles("w1"))
    assert await handles().resume([Checkpoint(lease_of(older), 0, (1, 2))]) == [True]
    assert [(c.num_received, c.output_token_ids) for c in await claim(handles("w1"))] == [(0, (7,))]


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


# -- parts of jobs -----------------------------------------------------------------------------------------------------


async def claimed_part(handles: Handles, name: str, worker: str = "w1", part: str = "part") -> Claimed:
    """Put a request for a part of a job, and claim it."""
    await handles().put([make_request(name, job_part=part)])
    [claimed] = await claim(handles(worker), 1)
    return claimed


@pytest.mark.parametrize("end", ["ack", "cancel"])
async def test_the_output_of_a_part_outlives_its_request(handles: Handles, end: str) -> None:
    first = await claimed_part(handles, "first")
    await handles("w1").checkpoint([Checkpoint(lease_of(first), 0, (4, 5))])
    await (handles().ack([lease_of(first)]) if end == "ack" else handles().cancel(["first"]))
    assert (await claimed_part(handles, "other", part="another part")).output_token_ids == ()
    second = await claimed_part(handles, "second")
    assert second.output_token_ids == (4, 5)
    assert await handles("w1").checkpoint([Checkpoint(lease_of(second), 2, (6,))]) == [3]
    await handles("w2").requeue_worker("w1")
    assert {c.request.id: c.output_token_ids for c in await claim(handles("w2"))} == {"second": (4, 5, 6), "other": ()}


async def test_of_two_requests_for_a_part_the_one_that_was_put_last_writes(handles: Handles) -> None:
    """The gateway of the first one has died, or was only slow; its request may even be claimed last."""
    await handles().put([make_request("old", deadline_ms=2, job_part="part")])
    await handles().put([make_request("new", deadline_ms=1, job_part="part")])
    [new] = await claim(handles("w1"), 1)
    assert await handles("w1").checkpoint([Checkpoint(lease_of(new), 0, (1, 2))]) == [2]
    [old] = await claim(handles("w2"), 1)
    assert old.output_token_ids == (1, 2)
    assert await handles("w2").checkpoint([Checkpoint(lease_of(old), 2, (9,))]) == [-1]
    assert await handles("w2").checkpoint([Checkpoint(lease_of(old), 0, (9,))]) == [-1]
    await handles().cancel(["old"])
    assert await handles("w1").checkpoint([Checkpoint(lease_of(new), 2, (3,))]) == [3]


async def test_a_newer_request_takes_over_in_mid_part_and_what_it_leaves_is_taken_back_whole(handles: Handles) -> None:
    old = await claimed_part(handles, "old")
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 0, (1, 2))]) == [2]
    new = await claimed_part(handles, "new", "w2")
    assert new.output_token_ids == (1, 2)
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 2, (9,))]) == [-1], "the new one writes now"
    assert await handles("w2").checkpoint([Checkpoint(lease_of(new), 2, (3,))]) == [3]
    await handles().cancel(["new"])
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 3, (9,))]) == [3], "these are not its own tokens"
    assert await handles("w1").checkpoint([Checkpoint(lease_of(old), 0, (1, 2, 9))]) == [3]
    assert (await claimed_part(handles, "last")).output_token_ids == (1, 2, 9)


async def test_the_output_of_an_ended_part_expires(redis_client: Redis, clock: ManualClock) -> None:
    handles = Handles(clock, redis_client)
    first, key = await claimed_part(handles, "first"), Keys.of(redis_client).output + "part"
    await handles("w1").checkpoint([Checkpoint(lease_of(first), 0, (4, 5))])
    assert keys.PART_TTL_S < await redis_client.ttl(key) <= keys.OUTPUT_TTL_S
    await handles().cancel(["first"])
    assert 0 < await redis_client.ttl(key) <= keys.PART_TTL_S
    await handles().put([make_request("second", job_part="part")])
    assert await redis_client.ttl(key) > keys.PART_TTL_S, "the next one may wait for long"
    await handles.close()


writes = st.tuples(st.just("write"), st.integers(1, 3), st.sampled_from(["more", "whole", "not yet"]))
moves = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 5)),
    st.tuples(st.just("claim"), st.sampled_from(["w1", "w2"])),
    writes,
    writes,
    st.tuples(st.sampled_from(["ack", "cancel", "release"]), st.integers(1, 3)),
    st.tuples(st.just("death"), st.sampled_from(["w1", "w2"])),
)


async def play_part(url: str, done: list[tuple]) -> None:  # type: ignore[type-arg]
    """Let requests for one part of a job come, write and go. Each claim generates tokens of its own."""
    client = connection.connect(url)
    handles = Handles(ManualClock(), client)
    generations: list[tuple[Lease, list[int]]] = []  # of each claim: its tokens, with those from which it continued
    try:
        for number, (name, *arguments) in enumerate(done):
            if name == "put":
                await handles().put([make_request(f"r{number}", deadline_ms=arguments[0], job_part="part")])
            elif name == "claim":
                for claimed in await claim(handles(arguments[0]), 1):
                    output = list(claimed.output_token_ids)
                    known = [tokens[: len(output)] for _, tokens in generations]
                    assert not output or output in known, "the tokens of one claim, from its beginning"
                    generations.append((lease_of(claimed), output))
            elif name == "death":
                await handles().requeue_worker(arguments[0])
            elif generations:
                lease, tokens = generations[-arguments[0] % len(generations)]
                match name, arguments[1:]:
                    case "write", ("not yet",):
                        tokens.append(number)
                    case "write", (how,):
                        index = len(tokens) if how == "more" else 0
                        tokens.append(number)
                        await handles().checkpoint([Checkpoint(lease, index, tuple(tokens[index:]))])
                    case "cancel", _:
                        await handles().cancel([lease.request_id])
                    case _:
                        await getattr(handles(), name)([lease])
    finally:
        await handles.close()
        await client.aclose()


UNWRITTEN = ("write", 1, "not yet")  # of the newest claim, so that its tokens are as many as the older one has stored


@example(
    done=[
        *[("put", 1), ("claim", "w1"), ("put", 2), ("claim", "w2"), ("write", 2, "whole"), UNWRITTEN],
        *[("write", 1, "more"), ("cancel", 1), ("put", 3), ("claim", "w1")],
    ]
)
@given(done=st.lists(moves, min_size=8, max_size=40))
def test_no_output_of_a_part_mixes_two_generations(valkey_server: Store, done: list[tuple]) -> None:  # type: ignore[type-arg]
    valkey_server.empty()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(play_part(valkey_server.url, done))


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


async def test_marks_concern_one_claim_of_one_worker(handles: Handles) -> None:
    a, b = await claimed(handles, "a", "b")
    await handles("w1").note_step({lease_of(a): True}, lease_of(b))
    await die(handles, "silence")
    again = await claim(handles("w2"))
    assert attempts(again) == {"a": 1, "b": 2}
    await handles("w1").note_step({lease_of(c): True for c in (a, b)}, None)  # it only seemed dead
    await die(handles, "silence", "w2")
    assert attempts(await claim(handles("w1"))) == {"a": 2, "b": 3}
