"""The worker process around its loop: outages of the store, signals, and ends before it has served."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import ConnectionError as StoreUnreachable
from structlog.testing import capture_logs

from engine.factory import SPIN_COUNT
from engine.interface import EngineDead, EngineInfo, PlanError, StepPlan, StepResult
from engine.modeled.engine import ModeledEngine
from engine.native.cpu.build import torch_openmp
from scheduler.drivers.steps.driver import StepDriver
from scheduler.queue.memory import MemoryQueue
from scheduler.worker.heartbeat import DuplicateWorker, WorkerIdentity
from scheduler.worker.leases import LEASE_S
from scheduler.worker.loop import WorkerLoop, build_loop
from scheduler.worker.metrics import SchedulerMetrics
from tests.scheduler.builders import FAST, expected_tokens, make_core, make_info, make_tiers
from tests.scheduler.world import World, run_bounded
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.keeper import EX_CONFIG
from tidegate.supervision.process import LONGEST_PAUSE_S, SETTLED_S
from tidegate.worker import engine_worker as worker
from tidegate.worker.engine_worker import run_worker
from tidegate.worker.process import GIVE_UP_S, LoopRunner, WorkerProcess, keep_serving, run_process

DRAIN_S = 5.0


class UnhurriedEngine(ModeledEngine):
    """Like the real engine, continues a step whose `collect` was cancelled and returns it to the next `collect`; takes
    no other step before."""

    _step: asyncio.Future[StepResult] | None = None

    def submit(self, plan: StepPlan) -> None:
        assert self._step is None, "a step is in flight already"
        super().submit(plan)
        self._step = asyncio.ensure_future(super().collect())

    async def collect(self) -> StepResult:
        assert self._step is not None, "no step is in flight"
        result = await asyncio.shield(self._step)
        self._step = None
        return result


class Unreliable:
    """A worker's handle on a queue whose store can go away."""

    def __init__(self, inner: MemoryQueue) -> None:
        self._inner = inner
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._inner, name)
        return target if name in ("close", "cancelled") else self._unless_away(target)

    def _unless_away(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def guarded(*args: Any, **options: Any) -> Any:
            if self.is_away:
                raise StoreUnreachable("Connection refused.")
            return await call(*args, **options)

        return guarded


class Rig(World):
    """A worker kept serving, and a client, in virtual time."""

    def __init__(self) -> None:
        super().__init__(make_tiers())
        info = make_info()
        self.core = make_core(self.tiers, info)
        self.engine = UnhurriedEngine(info, self.clock.sleep, FAST, noise=0.0)
        self.store = Unreliable(self.queue.for_worker("w"))
        self.metrics = SchedulerMetrics(CollectorRegistry(), self.tiers)
        self.runner = LoopRunner(DRAIN_S)
        self.loops = 0

    def build(self) -> WorkerLoop:
        self.loops += 1
        driver, identity = StepDriver(self.core, self.engine), WorkerIdentity("w", ("model",), self.clock.wall_ms())
        # The store is a queue, by __getattr__.
        return build_loop(driver, self.store, self.events, self.registry, self.metrics, self.clock, identity)

    async def serve(self) -> None:
        await keep_serving(self.build, self.runner, self.clock)


def play(story: Callable[[Rig, "asyncio.Task[None]"], Awaitable[None]]) -> None:
    async def main() -> None:
        rig = Rig()
        serving = asyncio.create_task(rig.serve())
        await asyncio.sleep(0)
        await rig.client.start()
        try:
            await story(rig, serving)
        finally:
            await rig.client.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    run_bounded(main())


# -- the store goes away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away_s", [1.0, LEASE_S + 5.0])
def test_the_engine_outlives_an_outage_of_the_store_and_every_answer_is_complete(away_s: float) -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        requests = [rig.request(f"r{i}", "bulk", max_tokens=200) for i in range(6)]
        answers = [asyncio.create_task(rig.receive(r)) for r in requests]
        await rig.clock.sleep(0.505)  # in the middle of a step
        assert rig.core.is_busy
        rig.store.is_away = True
        await rig.clock.sleep(away_s)
        assert not serving.done()
        rig.store.is_away = False
        assert [a.token_ids for a in await asyncio.gather(*answers)] == [expected_tokens(r) for r in requests]
        assert rig.loops > 1
        rig.runner.end()
        await serving
        assert rig.engine.num_used_blocks == 0, "dropped sequences are gone from the engine"
        assert rig.core.held.counts == {"accepted": 12, "finished": 6, "released": 6}
        assert await rig.registry.workers() == [], "withdrawn"

    play(story)


def test_the_worker_gives_up_after_a_long_outage() -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        await rig.clock.sleep(2 * SETTLED_S)
        rig.store.is_away = True
        began_s = rig.clock.now()
        with pytest.raises(StoreUnreachable):
            await serving
        assert GIVE_UP_S <= rig.clock.now() - began_s <= GIVE_UP_S + 2 * LONGEST_PAUSE_S

    play(story)


def test_outages_far_apart_are_not_added_up() -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        for _ in range(3):
            await rig.clock.sleep(2 * SETTLED_S)
            rig.store.is_away = True
            await rig.clock.sleep(GIVE_UP_S / 2)
            rig.store.is_away = False
        await rig.clock.sleep(LONGEST_PAUSE_S)
        assert not serving.done()

    play(story)


def test_an_error_that_is_not_the_stores_is_raised_at_once() -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        def broken(plan: StepPlan) -> None:
            raise EngineDead("device lost")

        rig.engine.submit = broken  # type: ignore[method-assign]
        await rig.submit(rig.request("r"))
        with pytest.raises(EngineDead):
            await serving
        assert rig.loops == 1

    play(story)


# -- signals -------------------------------------------------------------------------------------------------------


def test_a_signal_during_an_outage_ends_the_worker_at_once() -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        rig.store.is_away = True
        await rig.clock.sleep(20.0)
        rig.runner.end()
        async with asyncio.timeout(0.1):
            await serving

    play(story)


def test_a_signal_drains_and_a_second_one_stops() -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        generation = await rig.submit(rig.request("r", "bulk", max_tokens=400))
        await rig.clock.sleep(0.2)
        rig.runner.end()
        await rig.clock.sleep(0.2)
        assert not serving.done(), "running requests may end"
        rig.runner.end()
        async with asyncio.timeout(0.2):
            await serving
        assert await rig.queue.depths(["bulk"]) == {"bulk": 1}
        async with generation:
            pass

    play(story)


def test_requests_that_outlive_the_drain_go_back_to_the_queue() -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        for i in range(10):
            await rig.submit(rig.request(f"r{i}", "bulk", max_tokens=470))
        await rig.clock.sleep(0.1)
        rig.runner.end()
        async with asyncio.timeout(DRAIN_S + 0.5):
            await serving
        assert await rig.queue.depths(["bulk"]) == {"bulk": 10}

    play(story)


# -- before it serves ----------------------------------------------------------------------------------------------


class NoEngine:
    """An engine whose first step ends as told."""

    info: EngineInfo = make_info()

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.is_closed = False

    def submit(self, plan: StepPlan) -> None:
        pass

    async def collect(self) -> StepResult:
        raise self._error

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    return WorkerSettings(redis_url=f"unix://{tmp_path}/nobody.sock")


@pytest.mark.parametrize("error", [EngineDead("a step failed: out of memory"), PlanError("no room")])
def test_an_engine_that_breaks_in_its_first_steps_cannot_start(
    error: Exception, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = NoEngine(error)
    monkeypatch.setattr(worker, "build_engine", lambda config, progress, when_imported: engine)
    assert run_worker(settings) == EX_CONFIG
    assert engine.is_closed
    said = capfd.readouterr()
    assert f"the engine's first steps failed: {error}" in said.out + said.err
    assert "Traceback" not in said.out + said.err


def test_what_steps_cost_is_logged_by_name(settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ends_at_once(*_: object) -> None:
        pass

    engine = ModeledEngine(make_info(), ends_at_once, FAST, noise=0.0)
    monkeypatch.setattr(worker, "build_engine", lambda config, progress, when_imported: engine)
    monkeypatch.setattr(worker, "_serve_requests", ends_at_once)
    with capture_logs() as lines:
        assert run_worker(settings) == 0
    (line,) = [line for line in lines if line["event"] == "the worker serves"]
    assert line["step_cost"]["step_s"] > 0


def test_a_worker_whose_id_is_taken_cannot_start(settings: WorkerSettings, capfd: pytest.CaptureFixture[str]) -> None:
    def serve(process: WorkerProcess) -> None:
        raise DuplicateWorker(process.identity.worker_id)

    assert run_process(settings.model_copy(update={"worker_id": "w"}), serve) == EX_CONFIG
    said = capfd.readouterr()
    assert "another worker with the id 'w' is at work on this store" in said.out + said.err


def test_an_interrupt_while_the_model_loads_is_an_ordinary_end(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: object, progress: object, when_imported: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "build_engine", interrupted)
    assert run_worker(settings) == 0


@pytest.mark.trap(16)
def test_a_device_that_is_lost_while_it_serves_ends_the_process_with_1(settings: WorkerSettings) -> None:
    def serve(*_: object) -> None:
        raise EngineDead("device lost")

    assert run_process(settings, serve) == 1


# -- the threads of its engine ---------------------------------------------------------------------------------------


def spin_count(settings: WorkerSettings, **environment: str) -> str:
    """Return the spin count that libgomp reads when a worker's process loads it. The worker has no model to serve."""
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = (sys.executable, "-m", "tidegate", "worker", "--redis-url", str(settings.redis_url), "--model", "./none")
    done = subprocess.run(
        command, env={**clean, **environment, "OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == EX_CONFIG, done.stderr
    (count,) = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    return str(count)


@pytest.mark.full
@pytest.mark.skipif(torch_openmp() is None, reason="this torch does not use GNU OpenMP")
def test_the_threads_of_a_workers_engine_spin_only_briefly(settings: WorkerSettings) -> None:
    assert spin_count(settings) == str(SPIN_COUNT)
    assert int(spin_count(settings, OMP_WAIT_POLICY="active")) > 1000 * SPIN_COUNT, "the user's choice"
