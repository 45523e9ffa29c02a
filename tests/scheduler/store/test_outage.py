"""A store that refuses writes for a while: what workers and gateways keep, and what their clients get."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from scheduler.registry.heartbeat_monitor import CHECK_S, WORKER_SILENT_S
from scheduler.request import EventKind
from scheduler.store.errors import CAUSES, StoreRefused
from scheduler.worker.leases import LEASE_S
from tests.scheduler.builders import expected_tokens
from tests.scheduler.worker.test_peers import second_worker
from tests.scheduler.world import World, played_by, run_world

QUEUE_WRITES = ("put", "claim", "ack", "renew", "release", "requeue_expired", "requeue_worker", "cancel", "probe")


class Store:
    """Makes everything that a world writes fail while it is `full`, as a full disk does."""

    def __init__(self, world: World) -> None:
        self.full = False
        self.requeued: list[str] = []
        self._guard(world.events, "publish")
        self._guard(world.registry, "announce")
        self._guard(world.queue, *QUEUE_WRITES)
        self._guard(world.worker_queue, *QUEUE_WRITES)

    def _guard(self, target: Any, *names: str) -> None:
        for name in names:
            setattr(target, name, self._unless_full(getattr(target, name), name))

    def _unless_full(self, call: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
        async def guarded(*args: Any, **options: Any) -> Any:
            if self.full:
                raise StoreRefused(CAUSES["MISCONF"])
            result = await call(*args, **options)
            if name.startswith("requeue"):
                self.requeued += result
            return result

        return guarded


@played_by(run_world)
async def test_a_short_refusal_delays_tokens_and_costs_nothing(world: World) -> None:
    store = Store(world)
    asking = asyncio.create_task(world.ask("chat", max_tokens=60))
    while not len(world.core.held):
        await world.clock.sleep(0.01)
    await world.clock.sleep(0.1)
    store.full = True
    await world.clock.sleep(WORKER_SILENT_S)
    seen = len(world.answers["chat"].token_ids)
    assert 0 < seen < 60
    store.full = False
    answer = await asking
    assert answer.token_ids == expected_tokens(answer.request)
    assert [e.index for e in answer.events] == sorted(e.index for e in answer.events)
    assert not world.running.done(), "the worker goes on"
    assert store.requeued == []


@played_by(run_world)
async def test_a_long_refusal_ends_chats_with_its_cause_and_bulk_waits_for_its_end(world: World) -> None:
    store = Store(world)
    bulk = asyncio.create_task(world.ask("bulk", tier="bulk", max_tokens=40))
    chat = asyncio.create_task(world.ask("chat", max_tokens=400))
    while len(world.core.held) < 2:
        await world.clock.sleep(0.01)
    store.full = True
    async with asyncio.timeout(10.0):
        answer = await chat
    assert answer.events[-1].kind is EventKind.UNAVAILABLE
    assert CAUSES["MISCONF"] in (answer.events[-1].error or "")
    assert CAUSES["MISCONF"] in (world.client.refusal or "")
    for tier in ("realtime", "bulk"):
        with pytest.raises(StoreRefused):
            await world.submit(world.request(f"another {tier}", tier))
    await world.clock.sleep(3 * LEASE_S)
    store.full = False
    finished = await bulk
    assert finished.token_ids == expected_tokens(finished.request)
    assert not world.running.done(), "the worker goes on"
    await world.clock.sleep(2.0)
    assert world.client.refusal is None
    assert await world.queue.known(["chat"]) == [False]
    again = await world.ask("again")
    assert again.token_ids == expected_tokens(again.request)


@played_by(run_world)
async def test_workers_do_not_take_each_other_for_dead_while_the_store_refuses_their_heartbeats(world: World) -> None:
    store = Store(world)
    second = second_worker(world)
    store._guard(second.queue, *QUEUE_WRITES)
    asking = [asyncio.create_task(world.ask(f"b{i}", tier="bulk", max_tokens=400)) for i in range(6)]
    while len(world.core.held) + len(second.core.held) < 6:
        await world.clock.sleep(0.01)
    store.full = True
    await world.clock.sleep(WORKER_SILENT_S + 10 * CHECK_S + LEASE_S)
    store.full = False
    await world.clock.sleep(1.0)
    for answer in await asyncio.gather(*asking):
        assert answer.token_ids == expected_tokens(answer.request)
    assert store.requeued == []
    second.loop.drain()
    await second.running
