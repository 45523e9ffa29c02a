"""What a worker announces about itself."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.modeled.engine import ModeledEngine
from scheduler.drivers.steps.driver import StepDriver
from scheduler.registry.heartbeat_monitor import CHECK_S, WORKER_SILENT_S
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.registry.worker_status import WorkerStatus
from scheduler.worker.heartbeat import DuplicateWorker, Heartbeat, WorkerIdentity
from tests.scheduler.builders import FAST, expected_tokens, make_core, make_info, make_tiers
from tests.scheduler.queue.harness import ManualClock
from tests.scheduler.world import Answer, Worker, World, played_by, run_world
from tests.test_architecture import ROOT

STATES = {"waiting", "running", "paused", "swapped"}
BEGINS_TO_GROW = ("bulk", "batch_size", 2, 4, "queue")


@played_by(run_world, tiers=make_tiers(bulk={"batch_size": {"min": 1, "start": 2, "max": 6}}), noise=0.05)
async def test_a_worker_says_what_its_controller_does_and_as_of_when(world: World) -> None:
    bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=100)) for i in range(6)]
    await world.clock.sleep(2.0)
    [explained] = [json.loads(text) for text in (await world.registry.sla()).values()]
    assert world.clock.wall_ms() - 1500 <= explained["at_ms"] <= world.clock.wall_ms()
    assert set(explained["tiers"]) == set(make_tiers().tiers)
    bulk_report = explained["tiers"]["bulk"]
    assert 0 < sum(bulk_report["requests"].values()) <= 6 and set(bulk_report["requests"]) == STATES
    assert 0 < bulk_report["engine_s"] <= 2.0 and explained["tiers"]["realtime"]["engine_s"] == 0
    assert 0 < explained["kv_usage"] <= 6 * 9 / 400, "six have up to 132 tokens"
    assert 0 < explained["step_time_error"] < 0.5
    first = explained["decisions"][0]
    assert (first["tier"], first["knob"], first["old"], first["new"], first["signal"]) == BEGINS_TO_GROW
    assert 0 < first["ago_s"] < 2.0
    await asyncio.gather(*bulk)


def keys_of(value: Any) -> Iterator[str]:
    """Return all keys of an explanation, without the names of tiers and switches, which tiers.yaml has."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "tiers":
            yield from (found for tier in inner.values() for found in keys_of(tier))
        elif key != "switches":
            yield key
            yield from keys_of(inner)
    for inner in value if isinstance(value, list) else ():
        yield from keys_of(inner)


@played_by(run_world, noise=0.05)
async def test_the_documentation_names_whatever_a_worker_says_of_its_controller(world: World) -> None:
    await asyncio.gather(world.ask("chat"), *(world.ask(f"b{i}", "bulk", max_tokens=60) for i in range(90)))
    await world.clock.sleep(1.0)
    [text] = (await world.registry.sla()).values()
    page = (ROOT / "docs" / "controller.md").read_text(encoding="utf-8")
    section = page[page.index("## What `GET /admin/sla` shows") : page.index("## What each idea is worth")]
    assert json.loads(text)["decisions"]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", section))))
    assert set(keys_of(json.loads(text))) - named == set()


def namesake(world: World, incarnation: str) -> Worker:
    """Begin another process with the id of the world's own worker."""
    engine = ModeledEngine(make_info(), world.clock.sleep, FAST)
    return world.add_worker(StepDriver(make_core(), engine), engine, "worker", incarnation)


async def busy_worker(world: World, incarnation: str) -> "asyncio.Task[Answer]":
    """Replace the world's own worker by one with an incarnation, which holds a chat."""
    world.loop.drain()
    await world.running
    engine = ModeledEngine(make_info(), world.clock.sleep, FAST)
    world.begin_worker(StepDriver(make_core(), engine), engine, incarnation=incarnation)
    await world.settle()
    chat = asyncio.create_task(world.ask("chat", max_tokens=400))
    await world.clock.sleep(0.5)
    assert len(world.core.held) == 1
    return chat


@played_by(run_world)
async def test_a_newcomer_with_the_id_of_a_live_worker_ends_and_takes_none_of_its_leases(world: World) -> None:
    chat = await busy_worker(world, "1-a")
    newcomer = namesake(world, "2-b")
    with pytest.raises(DuplicateWorker, match=r"the id 'worker' is at work on this store; give each its own"):
        await newcomer.running
    assert len(world.core.held) == 1 and not len(newcomer.core.held)
    answer = await chat
    assert answer.token_ids == expected_tokens(answer.request)
    assert [w.incarnation for w in await world.registry.workers()] == ["1-a"]


class Said:
    """What a worker says of itself, without a worker. Implements `SelfReport`."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity

    def read(self, now: float, wall_ms: int, interval_s: float) -> tuple[WorkerStatus, str]:
        return WorkerStatus(self._identity.worker_id, (), 1, 1, 0, incarnation=self._identity.incarnation), "{}"


async def test_of_two_that_have_announced_themselves_at_once_the_later_one_ends() -> None:
    clock = ManualClock()
    registry = MemoryWorkerRegistry(clock)
    identities = [WorkerIdentity("worker", (), 0, incarnation) for incarnation in ("1-a", "2-b")]
    older, later = (Heartbeat(registry, Said(identity), clock, identity) for identity in identities)
    await older.beat()
    await later.beat()  # the older one may have ended just now
    await older.beat()
    with pytest.raises(DuplicateWorker):
        await later.beat()


@played_by(run_world)
async def test_a_successor_waits_until_its_predecessor_is_silent_and_takes_its_work_over(world: World) -> None:
    chat = await busy_worker(world, "1-a")
    await world.kill_worker()
    engine = ModeledEngine(make_info(), world.clock.sleep, FAST)
    world.begin_worker(StepDriver(make_core(), engine), engine, incarnation="2-b")
    killed_s = world.clock.now()
    while not len(world.core.held):
        await world.clock.sleep(0.1)
    assert world.clock.now() - killed_s <= WORKER_SILENT_S + 2 * CHECK_S
    answer = await chat
    assert answer.token_ids == expected_tokens(answer.request)
