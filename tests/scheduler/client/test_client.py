"""The gateway's client: the events of a request, and rejected requests. Tests send the workers' events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest
from redis.exceptions import ConnectionError as StoreUnreachable

from engine.interface import FinishReason, TokenLogprobs
from scheduler.client.client import CHECK_EVERY, REFRESH_S, SchedulerClient
from scheduler.client.live_workers import WORKER_GRACE_S
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.client.token_stream import TokenStream
from scheduler.drivers.steps.driver import STUCK_S
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.heartbeat_monitor import CHECK_S
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from scheduler.request import ANSWER_TOO_LARGE, EventKind, Lease, Request, TokenEvent
from scheduler.virtual_time import VirtualClock
from tests.scheduler.builders import make_request, make_tiers
from tests.scheduler.world import played_by, run_bounded

MAX_LOGPROBS = 30  # of all streams: one alone may hold 20
HEARTBEAT_S = 1.0  # seconds between two announcements of a worker


class Stage:
    """A client with its queue, event channel and registry. The test acts as the worker.

    `beating` announces the worker `status` every second; a test cancels it to hang the worker."""

    beating: "asyncio.Task[None]"

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.queue = MemoryQueue(self.clock)
        self.events = MemoryEventChannel()
        self.registry = MemoryWorkerRegistry(self.clock)
        tiers = make_tiers(realtime={"queue_limit": 4})
        self.share = 0.0  # of the spread, at which refused clients come back
        parts = (self.queue, self.events, self.registry)
        self.client = SchedulerClient(
            *parts, tiers, self.clock, "gateway", draw=lambda: self.share, max_logprobs=MAX_LOGPROBS
        )
        self.status = WorkerStatus("w", ("model",), 512, 1000, 0, tiers={"realtime": TierStatus()})

    async def announce(self, **tiers: TierStatus) -> None:
        """Announce the worker now, with this status of `tiers` from now on."""
        self.status = replace(self.status, tiers=tiers or self.status.tiers, at_ms=self.clock.wall_ms())
        await self.registry.announce(self.status)

    async def beat(self) -> None:
        while True:
            await self.announce()
            await self.clock.sleep(HEARTBEAT_S)

    async def submit(self, *requests: Request) -> TokenStream:
        outcome = await self.client.submit(requests)
        assert isinstance(outcome, TokenStream)
        return outcome

    async def tell(self, *events: TokenEvent) -> None:
        assert await self.events.publish("gateway", events)

    async def depth(self) -> int:
        return (await self.client.depths())["realtime"]


def play(story: Callable[[Stage], Awaitable[None]], *, worker: bool = True) -> None:
    async def main() -> None:
        stage = Stage()
        stage.beating = asyncio.create_task(stage.beat())
        if not worker:
            stage.beating.cancel()
        await asyncio.sleep(0)
        await stage.client.start()
        try:
            await story(stage)
        finally:
            stage.beating.cancel()
            await stage.client.close()

    run_bounded(main())


def tokens(index: int, *token_ids: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.TOKENS, index, token_ids)


def finished(index: int, *token_ids: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.FINISHED, index, token_ids, FinishReason.LENGTH)


async def received(stream: TokenStream) -> list[TokenEvent]:
    async with stream as events:
        return [event async for event in events]


# -- events --------------------------------------------------------------------------------------------------------


@played_by(play)
async def test_tokens_arrive_in_order_and_end_with_one_last_event(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    await stage.tell(tokens(0, 5), tokens(1, 6, 7))
    await stage.tell(finished(3, 8))
    assert await received(stream) == [tokens(0, 5), tokens(1, 6, 7), finished(3, 8)]
    assert stage.client.num_open == 0


@played_by(play)
async def test_take_returns_all_waiting_events_at_once(stage: Stage) -> None:
    async with await stage.submit(make_request("r")) as stream:
        await stage.tell(tokens(0, 5), tokens(1, 6))
        await stage.clock.sleep(0.1)
        assert await stream.receive(0.0) == [tokens(0, 5), tokens(1, 6)]
        assert await stream.receive(0.0) == []
        await stage.tell(finished(2, 7))
        assert await stream.receive() == [finished(2, 7)]
        with pytest.raises(EOFError):
            await stream.receive()


@played_by(play)
async def test_take_waits_no_longer_than_its_timeout(stage: Stage) -> None:
    async with await stage.submit(make_request("r")) as stream:
        before_s = stage.clock.now()
        assert await stream.receive(2.0) == []
        assert stage.clock.now() - before_s == pytest.approx(2.0)
    assert await stage.depth() == 0, "leaving the block early cancels the request"


@played_by(play)
async def test_repeats_after_a_requeue_are_dropped_by_their_index(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    await stage.tell(tokens(0, 5), tokens(1, 6), tokens(0, 5), tokens(1, 6, 7), finished(0, 5, 6, 7, 8))
    assert await received(stream) == [tokens(0, 5), tokens(1, 6), tokens(2, 7), finished(3, 8)]


def test_repeats_lose_their_log_probabilities_in_step_with_their_tokens() -> None:
    prompt = (TokenLogprobs(3, -1.0), TokenLogprobs(4, -2.0))

    def scored(index: int, *token_ids: int) -> TokenEvent:
        logprobs = tuple(TokenLogprobs(token_id, -float(token_id)) for token_id in token_ids)
        prompt_logprobs = () if index else prompt
        return TokenEvent("r", EventKind.TOKENS, index, token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    async def story(stage: Stage) -> None:
        stream = await stage.submit(make_request("r"))
        await stage.tell(scored(0, 5), scored(1, 6), scored(0, 5), scored(0, 5, 6, 7), finished(3, 8))
        assert await received(stream) == [scored(0, 5), scored(1, 6), scored(2, 7), finished(3, 8)]

    play(story)


def scored(index: int, count: int, of: str = "r") -> TokenEvent:
    """Return an event with `count` tokens, of which each has one log probability."""
    found = tuple(TokenLogprobs(token_id, -1.0) for token_id in range(index, index + count))
    return TokenEvent(of, EventKind.TOKENS, index, tuple(range(index, index + count)), logprobs=found)


@played_by(play)
async def test_an_answer_with_more_log_probabilities_than_fit_fails_and_its_work_is_cancelled(stage: Stage) -> None:
    async with await stage.submit(make_request("r"), make_request("s")) as stream:
        worker = stage.queue.for_worker("w")
        await worker.claim({"realtime": 2}, 10.0)
        await stage.tell(scored(0, 12), scored(0, 8, "s"))
        assert await stream.receive() == [scored(0, 12), scored(0, 8, "s")]
        await stage.tell(scored(12, 1), scored(13, 1), scored(8, 1, "s"))
        [event] = [event async for event in stream]
    assert (event.request_id, event.index) == ("r", 12)
    assert (event.kind, event.code) == (EventKind.FAILED, ANSWER_TOO_LARGE)
    assert sorted(worker.cancelled()) == ["r", "s"] and stage.client.num_open == 0


@played_by(play)
async def test_an_answer_for_which_others_leave_no_room_is_told_to_come_again(stage: Stage) -> None:
    async with await stage.submit(make_request("large")), await stage.submit(make_request("small")) as small:
        await stage.tell(scored(0, 20, "large"), scored(0, 6, "small"))
        assert await small.receive() == [scored(0, 6, "small")]
        await stage.tell(scored(6, 1, "small"))
        [refused] = await small.receive()
        assert (refused.kind, refused.code) == (EventKind.UNAVAILABLE, "")
        async with await stage.submit(make_request("next")) as after:  # what was refused has made room at once
            await stage.tell(scored(0, 6, "next"))
            assert await after.receive() == [scored(0, 6, "next")]


@pytest.mark.parametrize("other", [tokens(0, 9), tokens(1, 9), finished(0, 5, 9), tokens(3, 8)])
@played_by(play)
async def test_an_output_that_diverges_fails_and_its_work_is_cancelled(stage: Stage, other: TokenEvent) -> None:
    """A mixture of two answers, or an answer with a gap, is worse than an error."""
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    await worker.claim({"realtime": 1}, 10.0)
    await stage.tell(tokens(0, 5), tokens(1, 6))
    await stage.tell(other)
    events = await received(stream)
    assert [(e.kind, e.index) for e in events] == [
        (EventKind.TOKENS, 0),
        (EventKind.TOKENS, 1),
        (EventKind.FAILED, 2),
    ]
    assert events[-1].error == "The generation was interrupted and could not be continued."
    assert await stage.queue.cancel(["r"]) == [False], "the queue has forgotten it"
    assert worker.cancelled() == ["r"], "and the worker was told"
    assert stage.client.num_open == 0


def fenced(event: TokenEvent, fence: int) -> TokenEvent:
    return msgspec.structs.replace(event, fence=fence)


@pytest.mark.parametrize(
    "late", [tokens(2, 9), finished(2, 9), TokenEvent("r", EventKind.FAILED, error="…"), tokens(0, 8)]
)
@played_by(play)
async def test_events_of_a_lost_lease_change_nothing_once_another_worker_has_the_request(
    stage: Stage, late: TokenEvent
) -> None:
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    [old] = await worker.claim({"realtime": 1}, 10.0)
    await stage.tell(fenced(tokens(0, 5), old.fence), fenced(tokens(1, 6), old.fence))
    await stage.queue.requeue_worker("w")
    [new] = await worker.claim({"realtime": 1}, 10.0)
    assert new.is_taken_over
    await stage.tell(TokenEvent("r", EventKind.TAKEN_OVER, fence=new.fence), fenced(late, old.fence))
    await stage.clock.sleep(0.001)
    [continued] = await worker.claim({"realtime": 1}, 10.0)
    assert (continued.output_token_ids, continued.num_received, continued.attempt) == ((5, 6), 2, 2)
    await stage.tell(fenced(late, new.fence - 1), fenced(finished(2, 7), continued.fence))
    assert [t for event in await received(stream) for t in event.token_ids] == [5, 6, 7]
    assert worker.cancelled() == []


@pytest.mark.parametrize("late", [tokens(3, 8), finished(3, 8), tokens(1, 8), finished(0, 5, 8, 9)])
@played_by(play)
async def test_a_request_whose_tokens_do_not_follow_those_that_came_goes_on_from_these(
    stage: Stage, late: TokenEvent
) -> None:
    """The store has lost a message, because too many were waiting, or an earlier claim, in a failover."""
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    [old] = await worker.claim({"realtime": 1}, 10.0)
    await stage.tell(fenced(tokens(0, 5), old.fence), fenced(tokens(1, 6), old.fence))
    await stage.tell(fenced(late, old.fence), fenced(tokens(4, 9), old.fence))
    await stage.clock.sleep(0.001)
    [continued] = await worker.claim({"realtime": 1}, 10.0)
    assert (continued.output_token_ids, continued.num_received, continued.attempt) == ((5, 6), 2, 1)
    assert await worker.renew([Lease("r", old.fence)], 10.0) == [False]
    await stage.tell(fenced(tokens(5, 1), old.fence), fenced(finished(2, 7), continued.fence))
    assert [t for event in await received(stream) for t in event.token_ids] == [5, 6, 7]


@played_by(play)
async def test_a_worker_that_contradicts_the_tokens_that_it_was_told_fails_the_request(stage: Stage) -> None:
    """An upstream that cannot continue an answer begins it again each time."""
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    for fence in (1, 2):
        await worker.claim({"realtime": 1}, 10.0)
        await stage.tell(fenced(tokens(0, 5), fence), fenced(tokens(0, 5 + fence), fence + 1))
    events = await received(stream)
    assert [(e.kind, e.token_ids) for e in events] == [(EventKind.TOKENS, (5,)), (EventKind.FAILED, ())]


@played_by(play)
async def test_a_request_whose_end_was_lost_on_the_way_fails_and_may_be_sent_again(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    [claimed] = await worker.claim({"realtime": 1}, 10.0)
    await worker.ack([Lease("r", claimed.fence)])
    await stage.tell(fenced(tokens(0, 5), claimed.fence), fenced(finished(2, 8), claimed.fence))
    events = await received(stream)
    assert [e.kind for e in events] == [EventKind.TOKENS, EventKind.UNAVAILABLE]
    assert "lost" in (events[-1].error or "")


@played_by(play)
async def test_a_request_that_has_ended_here_is_cancelled_where_it_was_taken_over(stage: Stage) -> None:
    """So is one that has all its tokens: only its end was lost."""
    ended = await stage.submit(make_request("ended"))
    whole = await stage.submit(make_request("whole", max_tokens=2))
    worker = stage.queue.for_worker("w")
    claimed = await worker.claim({"realtime": 2}, 10.0)
    await stage.tell(tokens(0, 5, 6, of="whole"), finished(0, 5, of="ended"))
    await stage.tell(*(TokenEvent(c.request.id, EventKind.TAKEN_OVER, fence=c.fence) for c in claimed))
    await stage.clock.sleep(0.001)
    assert (await received(ended))[-1].kind is EventKind.FINISHED
    assert (await received(whole))[-1].finish_reason is FinishReason.LENGTH
    assert await stage.queue.known(["ended", "whole"]) == [False, False]


@played_by(play)
async def test_n_sequences_share_one_stream_and_each_has_a_last_event(stage: Stage) -> None:
    stream = await stage.submit(make_request("a"), make_request("b"))
    await stage.tell(tokens(0, 1, of="a"), finished(0, 2, of="b"))
    await stage.tell(finished(1, 3, of="a"))
    events = await received(stream)
    assert [(e.request_id, e.kind) for e in events] == [
        ("a", EventKind.TOKENS),
        ("b", EventKind.FINISHED),
        ("a", EventKind.FINISHED),
    ]


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


# -- rejections ----------------------------------------------------------------------------------------------------


async def refused(stage: Stage, *requests: Request) -> Rejected:
    outcome = await stage.client.submit(requests or [make_request("x")])
    assert isinstance(outcome, Rejected)
    assert 1 <= outcome.retry_after_s <= 120
    return outcome


@pytest.mark.trap(4, 15)
@played_by(play)
async def test_a_full_queue_refuses_all_or_none_and_n_counts_as_n(stage: Stage) -> None:
    """Traps 4 and 15: the queue checks the limit and enqueues in one atomic move."""
    await stage.submit(make_request("a"), make_request("b"))
    rejected = await refused(stage, *(make_request(f"n{i}") for i in range(3)))
    assert rejected.reason is RejectReason.QUEUE_FULL
    assert await stage.depth() == 2
    assert stage.client.num_open == 2, "rejected requests are not open"
    await stage.submit(make_request("c"), make_request("d"))


@played_by(play)
async def test_large_requests_fill_their_own_tier_and_no_other(stage: Stage) -> None:
    parts = (stage.queue, stage.events, stage.registry)
    client = SchedulerClient(*parts, make_tiers(), stage.clock, "gateway-2", queue_bytes=20_000)
    await client.start()
    large = [make_request(f"b{n}", "bulk", [70_000] * 1000) for n in range(3)]  # 5 KB each
    outcomes = [await client.submit([request]) for request in large]
    assert [isinstance(outcome, TokenStream) for outcome in outcomes] == [True, False, False]
    assert isinstance(outcomes[1], Rejected) and outcomes[1].reason is RejectReason.QUEUE_FULL
    for request in (make_request("c", "batch", [70_000] * 1000), make_request("chat", prompt=[70_000] * 1000)):
        assert isinstance(await client.submit([request]), TokenStream)
    await client.close()


CAPACITY = TierCapacity(slots_free=64, drain_per_s=1.0, prefill_tokens_per_s=1000.0, output_tokens_per_s=1000.0)
PREDICTING = make_tiers(realtime={"admission": {"predict": True}})


async def predicting_client(stage: Stage, gateway_id: str) -> SchedulerClient:
    """Return a client that knows the worker's capacity: 500 prompt tokens within the SLO of 0.5 s."""
    client = SchedulerClient(stage.queue, stage.events, stage.registry, PREDICTING, stage.clock, gateway_id)
    await stage.announce(**{name: TierStatus(batch_size=64, capacity=CAPACITY) for name in PREDICTING.tiers})
    await client.start()
    return client


async def num_admitted(*submits: Awaitable[TokenStream | Rejected]) -> int:
    outcomes = await asyncio.gather(*submits)
    assert {o.reason for o in outcomes if isinstance(o, Rejected)} <= {RejectReason.OVERLOADED}
    return sum(isinstance(o, TokenStream) for o in outcomes)


@pytest.mark.trap(4)
@played_by(play)
async def test_trap_4_a_burst_over_two_gateways_is_admitted_only_within_the_slo(stage: Stage) -> None:
    clients = [await predicting_client(stage, f"gateway-{n}") for n in range(2)]
    bursts = [c.submit([make_request(f"{c.gateway_id}-{i}", prompt=100)]) for i in range(20) for c in clients]
    assert await num_admitted(*bursts) == 5
    for client in clients:
        await client.close()


@played_by(play)
async def test_clients_that_are_refused_together_are_told_different_times(stage: Stage) -> None:
    await stage.submit(*(make_request(f"r{i}") for i in range(4)))
    first = await refused(stage)
    stage.share = 0.5
    later = await refused(stage)
    assert (first.retry_after_s, later.retry_after_s) == (30, 45)


@played_by(play, worker=False)
async def test_a_worker_that_has_just_come_serves_the_next_request(stage: Stage) -> None:
    assert isinstance(await stage.client.submit([make_request("a")]), Rejected)
    before_s = stage.clock.now()
    await stage.announce()
    async with await stage.submit(make_request("b")):
        assert stage.clock.now() == before_s
        assert [worker.worker_id for worker in stage.client.live.engines] == ["w"]


@played_by(play)
async def test_bulk_waits_a_while_for_a_restarting_engine_and_interactive_requests_are_refused_at_once(
    stage: Stage,
) -> None:
    stage.beating.cancel()
    await stage.registry.withdraw("w")
    await stage.clock.sleep(1.5 * CHECK_S)
    assert (await refused(stage, make_request("chat"))).reason is RejectReason.NO_ENGINE
    await stage.clock.sleep(WORKER_GRACE_S - 1)
    assert stage.client.live.engines == []
    await stage.submit(make_request("r", "bulk"))
    await stage.clock.sleep(2)
    assert (await refused(stage, make_request("b", "bulk"))).reason is RejectReason.NO_ENGINE


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
