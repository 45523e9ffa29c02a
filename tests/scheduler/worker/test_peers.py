"""Workers and gateways that go silent: who notices, how soon, and what becomes of their requests."""

import asyncio

import structlog

from engine.modeled.engine import ModeledEngine
from engine.step_time.cost import StepCost
from scheduler.drivers.steps.driver import STUCK_S, StepDriver
from scheduler.registry.heartbeat_monitor import CHECK_S, GATEWAY_SILENT_S, WORKER_SILENT_S
from scheduler.request import Delivery, EventKind
from tests.scheduler.builders import FAST, expected_tokens, make_core, make_info
from tests.scheduler.world import Worker, World, played_by, run_world

HEARTBEAT_S = 1.0
SLOW = StepCost(step_s=4.0, prefill_token_s=0.01, attend_s=0.0, context_token_s=0.0, decode_s=0.1)


class Stoppable(ModeledEngine):
    """An engine whose steps do not end while it is `stopped`."""

    def __init__(self, world: World) -> None:
        super().__init__(make_info(), world.clock.sleep, FAST)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def collect(self):  # type: ignore[no-untyped-def]
        await self.goes_on.wait()
        return await super().collect()


def second_worker(world: World) -> Worker:
    """Begin another worker on the queue of `world`, whose engine a test can stop."""
    engine = Stoppable(world)
    return world.add_worker(StepDriver(make_core(), engine), engine, "second")


async def two_workers(world: World) -> tuple[Worker, "asyncio.Task[object]"]:
    """Return a second worker that alone holds a chat, and the task that receives it; the first worker can take over."""
    limits = world.core.claim_limits
    world.core.claim_limits = lambda now: {}  # type: ignore[method-assign]
    second = second_worker(world)
    chat = asyncio.create_task(world.ask("chat", max_tokens=60))
    while not len(second.core.held):
        await world.clock.sleep(0.01)
    world.core.claim_limits = limits  # type: ignore[method-assign]
    await world.clock.sleep(0.2)
    assert 0 < len(world.answers["chat"].token_ids) < 60
    return second, chat


@played_by(run_world)
async def test_the_requests_of_a_hung_worker_go_on_at_another_one_within_three_seconds_with_the_same_tokens(
    world: World,
) -> None:
    second, chat = await two_workers(world)
    second.running.cancel()
    await asyncio.gather(second.running, return_exceptions=True)
    async with asyncio.timeout(3.0):
        await chat
    answer = world.answers["chat"]
    assert answer.token_ids == expected_tokens(answer.request)
    assert answer.events[-1].kind is EventKind.FINISHED


@played_by(run_world)
async def test_a_worker_that_is_stopped_in_order_looks_lost_to_nobody_and_one_that_dies_is_counted(
    world: World,
) -> None:
    second = second_worker(world)
    await world.clock.sleep(2 * HEARTBEAT_S)
    with structlog.testing.capture_logs() as logs:
        await world.registry.withdraw("second")
        second.running.cancel()
        await asyncio.gather(second.running, return_exceptions=True)
        await world.clock.sleep(WORKER_SILENT_S + 2 * CHECK_S)
    assert [entry["event"] for entry in logs if "silent" in entry["event"]] == []
    assert await world.registry.num_lost() == 0
    third = second_worker(world)
    await world.clock.sleep(2 * HEARTBEAT_S)
    third.running.cancel()
    await asyncio.gather(third.running, return_exceptions=True)
    with structlog.testing.capture_logs() as logs:
        await world.clock.sleep(WORKER_SILENT_S + 2 * CHECK_S)
    assert await world.registry.num_lost() == 1
    assert "a worker is silent" in {entry["event"].partition(";")[0] for entry in logs}


@played_by(run_world)
async def test_a_worker_whose_step_does_not_end_looks_dead_and_drops_the_lost_requests_when_it_goes_on(
    world: World,
) -> None:
    second, chat = await two_workers(world)
    second.engine.goes_on.clear()
    async with asyncio.timeout(STUCK_S + HEARTBEAT_S + WORKER_SILENT_S + 2 * CHECK_S):
        await chat
    answer = world.answers["chat"]
    assert answer.token_ids == expected_tokens(answer.request)
    assert second.loop.is_stuck
    assert (await world.ask("later")).ttft_s < 0.1, "no stuck worker claims it"
    assert [w.worker_id for w in world.client.live.engines] == ["worker"]
    second.engine.goes_on.set()
    await world.clock.sleep(5.0)
    assert not second.loop.is_stuck
    assert len(second.core.held) == 0
    assert {w.worker_id for w in world.client.live.engines} == {"worker", "second"}
    second.loop.drain()
    await second.running


@played_by(run_world, cost=SLOW, known=SLOW)
async def test_long_steps_are_not_stuck(world: World) -> None:
    answer = asyncio.create_task(world.ask("long", "bulk", prompt=500, max_tokens=3))
    while not answer.done():
        assert not world.loop.is_stuck
        await world.clock.sleep(0.25)
    assert world.answers["long"].ended_s is not None
    assert world.answers["long"].ended_s > 10.0


@played_by(run_world, info=make_info(max_model_len=8192, num_blocks=2000))
async def test_the_work_of_a_silent_gateway_is_dropped_within_five_seconds(world: World) -> None:
    beats = {"live": 0, "dead": 0}
    read_beats = world.events.beats

    async def beats_of(gateway_ids: list[str]) -> list[int | None]:
        beats["live"] += 1
        [own] = await read_beats(["gateway"])
        return [beats.get(i, own) for i in gateway_ids]

    world.events.beats = beats_of  # type: ignore[method-assign,assignment]
    for gateway in beats:
        await world.events.open(gateway)  # its stream outlives it
    more = {"max_tokens": 5000, "prompt": 16}
    for gateway in beats:
        await world.queue.put([world.request(f"of {gateway}", "bulk", reply_to=gateway, **more)])
    await world.queue.put([world.request("at end", "bulk", reply_to="dead", delivery=Delivery.AT_END, **more)])
    await world.clock.sleep(GATEWAY_SILENT_S - 2 * CHECK_S)
    assert len(world.core.held) == 3
    with structlog.testing.capture_logs() as logs:
        await world.clock.sleep(5.0 - GATEWAY_SILENT_S + 2 * CHECK_S)
    assert [(entry["gateway"], entry["count"]) for entry in logs if "gateway" in entry] == [("dead", 2)]
    assert [state.id for state in world.core.held.states] == ["of live"]
    await world.queue.put([world.request("late", "bulk", reply_to="dead", **more)])
    await world.clock.sleep(2 * CHECK_S)
    assert [state.id for state in world.core.held.states] == ["of live"], "it is known to be dead"
    await world.queue.cancel(["of live"])


@played_by(run_world, info=make_info(max_model_len=8192, num_blocks=2000))
async def test_the_end_of_a_gateway_without_requests_is_no_warning(world: World) -> None:
    """One that is stopped in order has none: each rolling restart would warn on each worker."""
    read_beats = world.events.beats
    beats = {"stopped": 0}

    async def beats_of(gateway_ids: list[str]) -> list[int | None]:
        [own] = await read_beats(["gateway"])
        return [beats.get(i, own) for i in gateway_ids]

    world.events.beats = beats_of  # type: ignore[method-assign,assignment]
    await world.events.open("stopped")
    await world.queue.put([world.request("its last", "bulk", reply_to="stopped", max_tokens=5000, prompt=16)])
    await world.clock.sleep(2 * CHECK_S)
    assert len(world.core.held) == 1
    with structlog.testing.capture_logs() as logs:
        await world.queue.cancel(["its last"])
        await world.clock.sleep(GATEWAY_SILENT_S + 2 * CHECK_S)
    assert len(world.core.held) == 0
    assert [entry["event"] for entry in logs if "silent" in entry["event"]] == []
