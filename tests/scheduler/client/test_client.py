"""The gateway's client: requests that are lost or cancelled, workers that hang, and its end."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any
from unittest import mock

from redis.exceptions import ConnectionError as StoreUnreachable

from engine.interface import FinishReason
from scheduler.client.client import CHECK_EVERY, REFRESH_S
from scheduler.client.rejection import RejectReason
from scheduler.drivers.steps.driver import STUCK_S
from scheduler.registry.heartbeat_monitor import CHECK_S
from scheduler.request import EventKind, TokenEvent
from tests.scheduler.builders import make_request, make_tiers
from tests.scheduler.client.stage import HEARTBEAT_S, Stage, finished, play, received, refused, tokens
from tests.scheduler.world import played_by

# -- lost requests -------------------------------------------------------------------------------------------------

LOST_WITHIN_S = (2 * CHECK_EVERY + 1) * REFRESH_S


@played_by(play)
async def test_a_request_that_the_queue_has_lost_fails_soon(stage: Stage) -> None:
    stream = await stage.submit(make_request("lost"), make_request("kept"))
    await stage.tell(tokens(0, 5, of="lost"))
    del stage.queue._shared.records["lost"]  # a failover has lost the put
    async with stream as events, asyncio.timeout(LOST_WITHIN_S):
        assert await anext(events) == tokens(0, 5, of="lost")
        event = await anext(events)
    assert (event.request_id, event.kind, event.index) == ("lost", EventKind.UNAVAILABLE, 1)
    assert "lost" in event.error


@played_by(play)
async def test_a_waiting_or_leased_request_is_never_taken_for_lost(stage: Stage) -> None:
    leased = await stage.submit(make_request("leased"))
    await stage.queue.for_worker("w").claim({"realtime": 1}, 10.0)
    waiting = await stage.submit(make_request("waiting"))
    await stage.clock.sleep(10 * LOST_WITHIN_S)
    assert stage.client.num_open == 2
    async with leased, waiting:
        pass


@played_by(play)
async def test_a_request_that_is_still_being_put_is_not_lost(stage: Stage) -> None:
    put = stage.queue.put

    async def slow_put(*arguments: Any) -> Any:
        await stage.clock.sleep(2 * LOST_WITHIN_S)
        return await put(*arguments)

    stage.queue.put = slow_put  # type: ignore[method-assign]
    async with await stage.submit(make_request("r")) as events:
        await stage.tell(finished(0, 5))
        assert [e async for e in events] == [finished(0, 5)]


@played_by(play)
async def test_fail_open_ends_every_open_request_with_the_reason(stage: Stage) -> None:
    first, second = await stage.submit(make_request("a"), make_request("b")), await stage.submit(make_request("c"))
    await stage.tell(tokens(0, 5, of="a"))
    await stage.clock.sleep(0.1)
    stage.client.drain()
    stage.client.fail_open("The server is shutting down.")
    ended = [*await received(first), *await received(second)]
    assert [(e.request_id, e.kind, e.index, e.error) for e in ended[1:]] == [
        ("a", EventKind.UNAVAILABLE, 1, "The server is shutting down."),
        ("b", EventKind.UNAVAILABLE, 0, "The server is shutting down."),
        ("c", EventKind.UNAVAILABLE, 0, "The server is shutting down."),
    ]
    assert stage.client.num_open == 0
    await stage.client.close()
    assert await stage.depth() == 0, "close cancels them"


# -- cancel --------------------------------------------------------------------------------------------------------


@played_by(play)
async def test_leaving_the_block_cancels_what_is_unfinished(stage: Stage) -> None:
    stream = await stage.submit(make_request("a"), make_request("b"))
    await stage.tell(finished(0, 1, of="a"))
    async with stream as events:
        assert (await anext(aiter(events))).request_id == "a"
    assert await stage.depth() == 1, "a was never acknowledged here, b is gone"
    assert await stage.queue.cancel(["b"]) == [False]
    assert stage.client.num_open == 0


@played_by(play)
async def test_a_submit_cancelled_during_the_put_leaves_nothing_in_the_queue(stage: Stage) -> None:
    put = stage.queue.put

    async def slow_answer(*arguments: Any) -> Any:
        refused = await put(*arguments)
        await stage.clock.sleep(1.0)
        return refused

    stage.queue.put = slow_answer  # type: ignore[method-assign]
    submitting = asyncio.create_task(stage.submit(make_request("a"), make_request("b")))
    await stage.clock.sleep(0.5)
    assert await stage.depth() == 2
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    await stage.clock.sleep(0.1)
    assert submitting.cancelled()
    assert await stage.depth() == 0
    assert stage.client.num_open == 0


@played_by(play)
async def test_a_cancel_in_an_outage_of_the_store_is_made_up_for(stage: Stage) -> None:
    await stage.submit(make_request("a"))
    cancel = stage.queue.cancel

    async def unreachable(request_ids: Iterable[str]) -> None:
        raise StoreUnreachable("the store is away")

    stage.queue.cancel = unreachable  # type: ignore[assignment, method-assign]
    await stage.client.cancel(["a"])
    assert await stage.depth() == 1
    stage.queue.cancel = cancel  # type: ignore[method-assign]
    await stage.clock.sleep(5.0)
    assert await stage.depth() == 0


# -- hung workers --------------------------------------------------------------------------------------------------


@played_by(play)
async def test_interactive_requests_are_refused_within_two_seconds_of_a_missed_heartbeat(stage: Stage) -> None:
    stage.beating.cancel()
    await stage.announce()
    await stage.clock.sleep(HEARTBEAT_S + 2.0)
    assert (await refused(stage)).reason is RejectReason.NO_ENGINE
    assert await stage.registry.workers() == [], "withdrawn"
    await stage.announce()
    await stage.clock.sleep(CHECK_S)
    await stage.submit(make_request("r"))


@played_by(play)
async def test_open_interactive_requests_of_a_hung_worker_fail_within_ten_seconds_and_bulk_requests_stay(
    stage: Stage,
) -> None:
    chat, bulk = await stage.submit(make_request("chat")), await stage.submit(make_request("bulk", "bulk"))
    await stage.queue.for_worker("w").claim({"realtime": 1, "bulk": 1}, 1000.0)
    await stage.tell(tokens(0, 5, of="chat"))
    stage.beating.cancel()
    async with asyncio.timeout(10.0 - STUCK_S):
        events = await received(chat)
    assert [(e.kind, e.index) for e in events] == [(EventKind.TOKENS, 0), (EventKind.UNAVAILABLE, 1)]
    assert "Try again" in events[-1].error
    await stage.clock.sleep(0.1)
    assert await stage.queue.known(["chat", "bulk"]) == [False, True]
    await stage.clock.sleep(100.0)
    await stage.tell(finished(0, 5, of="bulk"))
    assert await received(bulk) == [finished(0, 5, of="bulk")]


@played_by(play)
async def test_an_outage_of_the_store_fails_no_request(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    away = mock.AsyncMock(side_effect=ConnectionError("stopped"))
    with mock.patch.multiple(stage.registry, workers=away, beats=away):
        await stage.clock.sleep(30.0)
    await stage.registry.withdraw("w")  # expired meanwhile; the worker announces itself again within a second
    await stage.clock.sleep(5.0)
    await stage.tell(finished(0, 5))
    assert await received(stream) == [finished(0, 5)]


@played_by(play)
async def test_beats_are_read_twice_a_second_and_statuses_once(stage: Stage) -> None:
    registry = stage.registry
    with (
        mock.patch.object(registry, "workers", wraps=registry.workers) as workers,
        mock.patch.object(registry, "beats", wraps=registry.beats) as beats,
    ):
        await stage.clock.sleep(10.1)
    assert (workers.await_count, beats.await_count) == (10, 20)


@played_by(play)
async def test_a_draining_gateway_rejects_new_requests_and_serves_open_ones(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    stage.client.drain()
    assert (await refused(stage)).reason is RejectReason.DRAINING
    await stage.tell(finished(0, 5))
    assert await received(stream) == [finished(0, 5)]


@played_by(play)
async def test_a_request_whose_tier_was_just_removed_is_rejected(stage: Stage) -> None:
    stage.client.reconfigure(make_tiers(gold={"priority": 5}))
    late = make_request("r", tier="gold")
    stage.client.reconfigure(make_tiers())
    assert (await refused(stage, late)).reason is RejectReason.TIER_GONE
    assert stage.client.num_open == 0


@played_by(play)
async def test_listening_goes_on_after_an_error(stage: Stage) -> None:
    listen = stage.events.listen

    def broken(gateway_id: str) -> AsyncIterator[list[TokenEvent]]:
        stage.events.listen = listen  # type: ignore[method-assign]
        raise RuntimeError("out of order for once")

    stage.events.listen = broken  # type: ignore[method-assign]
    async with await stage.submit(make_request("a", max_tokens=1)) as stream:
        await stage.tell(TokenEvent("a", EventKind.FINISHED, 0, (7,), FinishReason.LENGTH))
        assert [e.token_ids async for e in stream] == [(7,)]
