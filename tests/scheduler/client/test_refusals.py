"""Requests that the gateway's client refuses, or accepts although it could not a moment ago."""

import asyncio
from collections.abc import Awaitable
from functools import partial

import pytest

from scheduler.client.client import SchedulerClient
from scheduler.client.live_workers import START_GAP_S, WORKER_GRACE_S
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.client.token_stream import TokenStream
from scheduler.registry.heartbeat_monitor import CHECK_S
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStart
from tests.scheduler.builders import make_request, make_tiers
from tests.scheduler.client.stage import Stage, play, refused
from tests.scheduler.world import played_by


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


# -- workers that start --------------------------------------------------------------------------------------------

LOADING = WorkerStart("w", "loading the model", 3.0)


async def report_start(stage: Stage) -> None:
    while True:
        await stage.registry.announce_start(LOADING)
        await stage.clock.sleep(1.0)


@played_by(partial(play, worker=False))
async def test_a_request_waits_for_a_worker_that_starts(stage: Stage) -> None:
    starting = asyncio.create_task(report_start(stage))
    await stage.clock.sleep(CHECK_S)
    waiting = asyncio.create_task(stage.submit(make_request("r")))
    await stage.clock.sleep(5.0)
    assert not waiting.done()
    starting.cancel()
    await stage.registry.withdraw_start("w")
    await stage.clock.sleep(START_GAP_S / 2)
    await stage.announce()
    await stage.clock.sleep(2 * CHECK_S)
    async with await waiting:
        assert await stage.depth() == 1


@played_by(partial(play, worker=False))
async def test_the_wait_for_a_start_ends_with_the_tiers_patience(stage: Stage) -> None:
    starting = asyncio.create_task(report_start(stage))
    stage.client.reconfigure(make_tiers(realtime={"admission": {"patience_ms": 10_000}}))
    await stage.clock.sleep(CHECK_S)
    began_s = stage.clock.now()
    rejected = await refused(stage)
    assert stage.clock.now() - began_s == pytest.approx(10.0, abs=CHECK_S)
    assert rejected.reason is RejectReason.NO_ENGINE
    assert rejected.message == "No engine is ready yet: a worker is loading the model, for 3 s so far."
    starting.cancel()
    await stage.registry.withdraw_start("w")
    await stage.clock.sleep(START_GAP_S + CHECK_S)
    began_s = stage.clock.now()
    await refused(stage)
    assert stage.clock.now() == began_s, "nothing starts"


@played_by(partial(play, worker=False))
async def test_who_waits_for_a_start_is_refused_when_the_server_drains(stage: Stage) -> None:
    await stage.registry.announce_start(LOADING)
    waiting = asyncio.create_task(refused(stage))
    await stage.clock.sleep(CHECK_S)
    stage.client.drain()
    await stage.clock.sleep(2 * CHECK_S)
    assert (await waiting).reason is RejectReason.DRAINING
