"""The driver, on the memory queue and the modeled engine, in virtual time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.interface import EngineDead
from engine.modeled.engine import ModeledEngine
from scheduler.control.windows import UPDATE_S
from scheduler.drivers.steps.driver import StepDriver
from scheduler.registry.heartbeat_monitor import CHECK_S, GATEWAY_SILENT_S
from scheduler.request import UNREADABLE_REQUEST, Claimed, Delivery, EventKind, Lease, TokenEvent
from scheduler.worker.claimer import LISTEN_S
from scheduler.worker.leases import LEASE_S
from tests.scheduler.builders import FAST, expected_tokens, fixed, make_core, make_info, make_tiers, preempted, ran
from tests.scheduler.world import Answer, World, played_by, run_world

STEP_S = 0.02  # about what a step of a few sequences takes


def record(journal: list[str], target: Any, method: str, text: Callable[..., str]) -> None:
    """Note each call of an async method before it happens."""
    original = getattr(target, method)

    async def noted(*args: Any) -> Any:
        journal.append(text(*args))
        return await original(*args)

    setattr(target, method, noted)


def worker_queue(world: World) -> Any:
    return world.worker_queue


@played_by(run_world)
async def test_a_request_that_cannot_be_read_fails_with_the_reason_and_the_worker_serves_its_neighbours(
    world: World,
) -> None:
    claim = world.worker_queue.claim

    async def with_a_damaged_one(*args: Any) -> list[Claimed]:
        claimed = await claim(*args)
        return [replace(c, unreadable="invalid opcode") if c.request.id == "damaged" else c for c in claimed]

    world.worker_queue.claim = with_a_damaged_one  # type: ignore[method-assign]
    damaged, *others = await asyncio.gather(*(world.ask(name) for name in ("damaged", "a", "b")))
    [end] = damaged.events
    assert (end.kind, end.code) == (EventKind.FAILED, UNREADABLE_REQUEST) and "invalid opcode" in end.error
    assert [other.token_ids for other in others] == [expected_tokens(other.request) for other in others]
    assert not world.queue._shared.records


# -- wake-ups ----------------------------------------------------------------------------------------------------------


@played_by(run_world)
async def test_a_put_costs_two_claims_however_many_workers_wait(world: World) -> None:
    calls: list[str] = []
    for number in range(20):
        engine = ModeledEngine(make_info(), world.clock.sleep, FAST)
        worker = world.add_worker(StepDriver(make_core(), engine), engine, f"w{number:02}")
        record(calls, worker.queue, "claim", lambda *args: "claim")
    await world.clock.sleep(0.1)
    calls.clear()
    for number in range(10):
        await world.ask(f"r{number}", max_tokens=2)
    assert 10 <= len(calls) <= 2 * 10
    await world.clock.sleep(60)
    assert len(calls) <= 2 * 10, "idle workers claim nothing"


@played_by(run_world)
async def test_a_lost_wakeup_delays_a_request_until_the_next_review(world: World) -> None:
    await world.clock.sleep(0.1)
    world.queue._shared.waiters.clear()
    assert (await world.ask("chat")).ttft_s < UPDATE_S + 0.1


@played_by(run_world)
async def test_an_idle_worker_is_woken_before_a_busy_one(world: World) -> None:
    engine = ModeledEngine(make_info(), world.clock.sleep, FAST)
    second = world.add_worker(StepDriver(make_core(), engine), engine, "a second")
    await world.clock.sleep(0.1)
    for name in ("first", "later"):  # before the later ones, both workers wait as idle ones again
        chats = []
        for number in range(2):
            chats.append(asyncio.create_task(world.ask(f"{name}-{number}", max_tokens=50)))
            await world.clock.sleep(0.01)
        assert (len(world.core.held), len(second.core.held)) == (1, 1)
        await asyncio.gather(*chats)
        await world.settle()


@pytest.mark.parametrize("drains", [False, True])
@played_by(run_world)
async def test_a_worker_that_claims_nothing_more_leaves_what_it_is_woken_for_to_others(
    world: World, drains: bool
) -> None:
    engine = ModeledEngine(make_info(), world.clock.sleep, FAST)
    full = world.add_worker(StepDriver(make_core(), engine), engine, "a second")
    await world.clock.sleep(0.1)
    full.core.claim_limits = lambda now: {}
    if drains:
        full.loop.drain()
    asked_s = world.clock.now()
    assert (await world.ask("chat")).ttft_s < 0.1, "no poll is waited for"
    assert world.clock.now() - asked_s < LISTEN_S


# -- the way in --------------------------------------------------------------------------------------------------------


@played_by(run_world)
async def test_an_arrival_on_an_idle_engine_starts_at_once(world: World) -> None:
    await world.clock.sleep(3.21)
    answer = await world.ask("r")
    assert answer.ttft_s < STEP_S


@played_by(run_world, known=FAST)
async def test_an_arrival_while_a_step_runs_is_in_the_very_next_one(world: World) -> None:
    bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=60)) for i in range(8)]
    await world.clock.sleep(0.3)
    steps = len(world.core.plans)
    answer = await world.ask("rt", max_tokens=4)
    following = [plan for _, plan in world.core.plans[steps:]]
    assert "rt" in ran(following[0])
    assert preempted(following[0]) == {f"b{i}": "pause" for i in range(8)}
    assert answer.ttft_s < 2 * STEP_S
    await asyncio.gather(*bulk)


@pytest.mark.trap(10)
@played_by(run_world, tiers=make_tiers(bulk={"batch_size": fixed(4)}))
async def test_requests_beyond_the_slots_wait_in_the_store(world: World) -> None:
    """Trap 10."""
    bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=20)) for i in range(30)]
    for _ in range(20):
        await world.clock.sleep(0.01)
        assert len(world.core.held) <= 4
        depth = (await world.queue.depths(["bulk"]))["bulk"]
        assert depth + len(world.core.held) + sum(t.done() for t in bulk) >= 30 - 4
    await asyncio.gather(*bulk)


def test_the_queue_is_served_by_deadline() -> None:
    async def story(world: World) -> list[str]:
        now_ms = world.clock.wall_ms()
        deadlines = {"last": now_ms + 3000, "first": now_ms + 1000, "second": now_ms + 2000}
        asked = [asyncio.create_task(world.ask(i, "bulk", deadline_ms=d)) for i, d in deadlines.items()]
        await asyncio.gather(*asked)
        lives = sorted(world.core.lives, key=lambda s: s.first_scheduled_s or 0.0)
        return [life.id for life in lives]

    assert run_world(story, tiers=make_tiers(bulk={"batch_size": fixed(1)})) == ["first", "second", "last"]


# -- the way out -------------------------------------------------------------------------------------------------------


def test_events_are_published_before_their_lease_is_acknowledged() -> None:
    async def story(world: World) -> list[str]:
        journal: list[str] = []

        def published(messages: Mapping[str, Sequence[TokenEvent]]) -> str:
            return "publish " + " ".join(f"{e.request_id}:{e.kind.value}" for m in messages.values() for e in m)

        record(journal, world.events, "publish", published)
        record(journal, worker_queue(world), "ack", lambda leases: "ack " + " ".join(x.request_id for x in leases))
        await asyncio.gather(world.ask("a", max_tokens=2), world.ask("b", max_tokens=3))
        await world.settle()
        return journal

    assert run_world(story) == [
        "publish a:tokens b:tokens",
        "publish a:finished b:tokens",
        "ack a",
        "publish b:finished",
        "ack b",
    ]


@played_by(run_world)
async def test_requests_that_report_only_at_their_end_are_dropped_with_their_gateway_too(world: World) -> None:
    orphan = world.request("orphan", max_tokens=400, reply_to="gone", delivery=Delivery.AT_END)
    await world.queue.put([orphan])
    await world.clock.sleep(GATEWAY_SILENT_S + 2 * CHECK_S)
    assert len(world.core.held) == 0
    assert world.core.held.counts["cancelled"] == 1
    assert not world.queue._shared.records


# -- cancel and leases -------------------------------------------------------------------------------------------------


@played_by(run_world)
async def test_a_cancelled_request_is_aborted_in_the_next_step(world: World) -> None:
    gone = asyncio.create_task(world.ask("gone", max_tokens=400))
    stays = asyncio.create_task(world.ask("stays", max_tokens=30))
    await world.clock.sleep(0.1)
    steps = len(world.core.plans)
    gone.cancel()
    await stays
    first = world.core.plans[steps][1]
    assert first.abort == ("gone",)
    assert list(ran(first)) == ["stays"]


@played_by(run_world, info=make_info(max_model_len=512))
async def test_work_stops_when_its_lease_is_lost(world: World) -> None:
    await world.submit(world.request("r", max_tokens=480, prompt=16))
    await world.clock.sleep(0.1)
    world.queue._shared.records["r"].fence = 10**15  # another worker has it now
    for _ in range(int(LEASE_S / UPDATE_S)):
        await world.clock.sleep(UPDATE_S)
        if not len(world.core.held):
            break
    assert len(world.core.held) == 0
    assert world.core.held.counts["released"] == 1
    cancelled = {"tier": "realtime", "reason": "cancelled"}
    shown = world.prometheus.get_sample_value("tidegate_requests_finished_total", cancelled)
    assert shown == 0, "no client has cancelled it"


@played_by(run_world, cost=replace(FAST, step_s=0.1))
async def test_long_work_keeps_its_lease(world: World) -> None:
    answer = await world.ask("r", "bulk", prompt=16, max_tokens=300)
    assert world.clock.now() > 2 * LEASE_S
    assert answer.token_ids == expected_tokens(answer.request)
    assert world.core.held.counts == {"accepted": 1, "finished": 1}


@played_by(run_world)
async def test_a_renewal_that_was_overtaken_does_not_drop_the_newer_lease(world: World) -> None:
    asked = asyncio.create_task(world.ask("r", prompt=16, max_tokens=480))
    await world.clock.sleep(0.1)
    record_ = world.queue._shared.records["r"]
    assert record_.fence is not None
    newer = Claimed(record_.request, record_.fence + 1, attempt=2)
    queue = worker_queue(world)
    renew = queue.renew

    async def overtaken(leases: Sequence[Lease], lease_s: float) -> list[bool]:
        if newer.fence != record_.fence:
            record_.fence = newer.fence
            kept: list[bool] = await renew(leases, lease_s)
            world.core.held.accept([newer], world.clock.now(), world.clock.wall_ms())
            return kept
        return list(await renew(leases, lease_s))

    queue.renew = overtaken
    answer = await asked
    assert record_.fence == newer.fence, "the renewal happened"
    assert answer.token_ids == expected_tokens(answer.request)


# -- the end -----------------------------------------------------------------------------------------------------------


@played_by(run_world)
async def test_drain_finishes_what_is_held_and_claims_nothing_more(world: World) -> None:
    held = asyncio.create_task(world.ask("held", max_tokens=100))
    await world.clock.sleep(0.1)
    world.loop.drain()
    late = await world.submit(world.request("late"))
    answer = await held
    await world.running
    assert answer.token_ids == expected_tokens(answer.request)
    assert await world.queue.depths(["realtime"]) == {"realtime": 1}
    assert not await world.registry.workers(), "withdrawn"
    async with late:
        pass


@played_by(run_world)
async def test_stop_gives_unfinished_requests_back_to_their_place_in_the_queue(world: World) -> None:
    requests = [world.request(f"b{i}", "bulk", max_tokens=400) for i in range(3)]
    await world.submit(*requests)
    await world.clock.sleep(0.1)
    world.loop.stop()
    await world.running
    assert await world.queue.depths(["bulk"]) == {"bulk": 3}
    assert world.core.held.counts["released"] == 3
    again = await world.queue.for_worker("other").claim({"bulk": 9}, LEASE_S)
    assert [(c.request.id, c.attempt) for c in again] == [("b0", 1), ("b1", 1), ("b2", 1)]


@played_by(run_world)
async def test_a_claim_interrupted_by_the_end_leaves_no_lease(world: World) -> None:
    """The store has made the claim, but its answer comes too late: the request must not wait for its lease to end."""
    queue = worker_queue(world)
    claim = queue.claim

    async def slow_answer(*args: Any) -> list[Claimed]:
        claimed: list[Claimed] = await claim(*args)
        await world.clock.sleep(0.2)
        return claimed

    queue.claim = slow_answer
    left = await world.submit(world.request("left"))
    await world.clock.sleep(0.1)
    world.loop.stop()
    await world.running
    assert await world.queue.depths(["realtime"]) == {"realtime": 1}
    async with left:
        pass


@pytest.mark.parametrize("breaks", [False, True])
@played_by(run_world)
async def test_at_its_end_the_loop_closes_its_queue(world: World, breaks: bool) -> None:
    assert len(world.queue._shared.listeners) == 2
    if breaks:
        worker_queue(world).depths = _breaks_later
        await world.worker_fails(Broken)
    else:
        world.loop.stop()
        await world.running
    assert len(world.queue._shared.listeners) == 1, "the gateway's"


class Broken(Exception):
    pass


def _breaks(*_: object) -> Any:
    raise Broken


async def _breaks_later(*_: object) -> Any:
    raise Broken


@pytest.mark.trap(16)
@pytest.mark.parametrize(
    "break_it",
    [
        lambda world: setattr(world.engine, "submit", _breaks),
        lambda world: setattr(world.engine, "collect", _breaks_later),
        lambda world: setattr(world.events, "publish", _breaks_later),
        lambda world: setattr(worker_queue(world), "claim", _breaks_later),
        lambda world: setattr(worker_queue(world), "depths", _breaks_later),
        lambda world: setattr(worker_queue(world), "wait_for_work", _breaks_later),
    ],
    ids=["plan refused", "engine", "events", "claim", "maintenance", "waiting"],
)
@played_by(run_world)
async def test_an_error_in_any_task_ends_all_of_them_and_is_raised(
    world: World, break_it: Callable[[World], None]
) -> None:
    """Trap 16: a loop that has lost a part must not look alive."""
    break_it(world)
    await world.queue.put([world.request("r")])
    tasks = len(asyncio.all_tasks())
    async with asyncio.timeout(2 * LISTEN_S + UPDATE_S):
        await world.worker_fails(Broken)
    assert len(asyncio.all_tasks()) < tasks, "no task of the loop is left"


@pytest.mark.parametrize("part", ["submit", "check_alive"])
@played_by(run_world)
async def test_a_dead_engine_ends_the_worker_with_its_error(world: World, part: str) -> None:
    """Also one that dies while nothing runs."""

    def dies(*_: object) -> None:
        raise EngineDead("device lost")

    setattr(world.engine, part, dies)
    if part == "submit":
        await world.queue.put([world.request("r")])
    await world.worker_fails(EngineDead, match="device lost")


# -- maintenance -------------------------------------------------------------------------------------------------------


@played_by(run_world, tiers=make_tiers(bulk={"batch_size": fixed(4)}))
async def test_the_heartbeat_shows_each_tier(world: World) -> None:
    bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=120)) for i in range(6)]
    await world.clock.sleep(1.01)
    [status] = await world.registry.workers()
    assert status.worker_id == "worker"
    assert status.model_names == ("model",)
    assert status.tiers["bulk"].running == 4
    assert status.tiers["bulk"].batch_size == 4
    await asyncio.gather(*bulk)
    await world.clock.sleep(2.0)
    [status] = await world.registry.workers()
    assert status.tiers["bulk"].running == 0
    assert status.tiers["bulk"].finished_per_s > 0


async def _bulk_share_under_a_flood(world: World, bulk: list[asyncio.Task[Answer]]) -> float:
    """Return bulk's share of engine time over 7 s in which interactive prompts wait all the time."""
    flood = [asyncio.create_task(world.ask(f"rt{i}", prompt=500, max_tokens=1)) for i in range(99)]
    await world.clock.sleep(0.3)
    before_s = dict(world.core.held.used_s)
    await world.clock.sleep(7.0)
    used_s = {tier: seconds - before_s[tier] for tier, seconds in world.core.held.used_s.items()}
    assert not all(request.done() for request in flood) and not all(request.done() for request in bulk)
    await asyncio.gather(*flood, *bulk)
    return used_s["bulk"] / sum(used_s.values())


@pytest.mark.parametrize("min_share", [0.0, 0.02])
def test_paused_bulk_gets_its_min_share_also_when_its_queue_is_empty(min_share: float) -> None:
    """What is due grows for held requests, too, not only for queued ones. Bulk prefills do not run beside interactive
    prefills as decodes do."""

    async def story(world: World) -> float:
        bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", prompt=500, max_tokens=1)) for i in range(4)]
        await world.clock.sleep(0.06)
        assert (await world.queue.depths(["bulk"]))["bulk"] == 0 and len(world.core.held) == 4
        return await _bulk_share_under_a_flood(world, bulk)

    tiers = make_tiers(bulk={"floor": min_share})
    share = run_world(story, known=FAST, info=make_info(max_step_tokens=128), tiers=tiers)
    assert share == pytest.approx(min_share, abs=0.005)


@pytest.mark.parametrize("min_share", [0.05, 0.2])
@pytest.mark.parametrize(("count", "part"), [(24, 0.9), (12, 0.6)])
def test_bulk_decodes_get_their_min_share_though_every_step_could_be_full_of_prompts(
    count: int, part: float, min_share: float
) -> None:
    """A token per sequence and step is very little time beside prompts that take a tenth of a second: what is due is
    served in steps that prompts do not fill. If it takes less than a step's fixed cost, as that of 12 sequences does
    (0.6 of it), these steps are as long as if it took that, so that prompts lose no more by them than bulk gets."""

    async def story(world: World) -> float:
        bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", prompt=16, max_tokens=480)) for i in range(count)]
        await world.clock.sleep(0.2)
        return await _bulk_share_under_a_flood(world, bulk)

    tiers = make_tiers(bulk={"floor": min_share}, realtime={"slo": {"ttft_p99_ms": 500}})
    share = run_world(story, known=FAST, tiers=tiers)
    assert part * min_share <= share <= min_share + 0.02
