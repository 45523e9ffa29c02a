"""The process of a worker, whatever it serves: its exit codes, its signals, and loops until the store is back.

What is loaded outlives a loop: if the store is unreachable for a while, the work in progress is lost, but the model is
kept. Exit codes: 0 after a signal; 78 if the worker cannot start (another attempt will not help); 1 after another
error, so that a supervisor starts a new worker. The new worker requeues what the old one held. Without a new worker,
this work is requeued when its leases end.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.config import EngineStartError
from engine.static.interface import EndpointHangs
from gateway.http.exposition import render_worker
from gateway.requests.tokens.model_files import vocabulary_of
from scheduler.clock import Clock, SystemClock
from scheduler.config import TierConfigError, TierSet, load_tiers
from scheduler.drivers.steps.step_log import StepLogError
from scheduler.queue.redis import RedisQueue
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierConsumer, TierFollower
from scheduler.reload.store import TierStore
from scheduler.store import connection
from scheduler.store.errors import StoreRefused
from scheduler.worker.heartbeat import DuplicateWorker, WorkerIdentity
from scheduler.worker.loop import WorkerLoop
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.keeper import EX_CONFIG
from tidegate.supervision.notify import report_life
from tidegate.supervision.process import (
    SETTLED_S,
    Background,
    CannotStart,
    hangup_calls,
    ignore_hangup,
    listen,
    pause_s,
    settle_heap,
    worker_name,
)
from tidegate.tracing.start import TracingError, traced
from tidegate.worker.health import WorkerHealth, answering

if TYPE_CHECKING:
    from tidegate.tracing.exporter import Tracing

log = structlog.get_logger()

GIVE_UP_S = 60.0  # s; the worker ends after an outage of the store of this length


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """What every worker has before it serves. `runner` handles its stop signals."""

    settings: WorkerSettings
    tiers: TierSet
    identity: WorkerIdentity
    clock: Clock
    runner: "LoopRunner"
    registry: CollectorRegistry  # of the worker's metrics
    health: WorkerHealth
    tracing: "Tracing | None"


def run_process(settings: WorkerSettings, serve: Callable[[WorkerProcess], None]) -> int:
    """Call `serve`, which returns after SIGTERM or SIGINT. Return the exit code."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # else every counter has a second series
    ignore_hangup()
    try:
        _run(settings, serve)
        return 0
    except (EngineStartError, TierConfigError, StepLogError, TracingError, DuplicateWorker, CannotStart) as error:
        log.error("the worker cannot start", reason=str(error))
        return EX_CONFIG
    except KeyboardInterrupt:
        log.info("the worker was interrupted before it served")
        return 0
    except EndpointHangs as error:
        log.error("the endpoint hangs; the worker ends, and its tasks are tried again", reason=str(error))
    except RedisError as error:
        log.error("the store does not answer", reason=str(error))
    except Exception:
        log.exception("the worker died")
    return 1


def _run(settings: WorkerSettings, serve: Callable[[WorkerProcess], None]) -> None:
    """Call `serve`, beside a thread that answers at the worker's own port."""
    if len(settings.named_models) > 1:
        raise CannotStart("a worker serves one model: --model NAME=PATH")
    tiers = load_tiers(settings.tiers_path)
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    clock, runner, registry = SystemClock(), LoopRunner(settings.drain_s), CollectorRegistry()
    is_named = bool(settings.named_models)
    render = partial(render_worker, registry, worker_id, settings.model_names[0], is_one_of_several=is_named)
    health, started_ms = WorkerHealth(clock, runner.why_not_ready, render), clock.wall_ms()
    with (
        listen(settings.health_host, settings.health_port, "--health-port") as listener,
        answering(listener, health.answer),
        traced("worker", worker_id, settings.otel) as tracing,
    ):
        host, port = settings.health_host, listener.getsockname()[1]
        page = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        log.info("the worker has a port of its own", metrics=page)
        incarnation = f"{started_ms}-{token_hex(4)}"
        # Without --model, nothing is known of the files of a server's model.
        is_known = settings.engine in ("native", "vllm", "embedding") or (
            settings.engine == "openai" and settings.model is not None
        )
        vocabulary = vocabulary_of(settings.model_path) if is_known else ""
        identity = WorkerIdentity(worker_id, settings.model_names, started_ms, incarnation, page, vocabulary)
        serve(WorkerProcess(settings, tiers, identity, clock, runner, registry, health, tracing))


async def serve_loops(
    process: WorkerProcess, consumer: TierConsumer, build: Callable[[Redis], WorkerLoop], is_stuck: Callable[[], bool]
) -> None:
    """Follow changes of the tiers, and run the loops that `build` makes until a signal ends the worker.

    `is_stuck` says whether the supervisor should replace this process.
    """
    settle_heap()
    settings, clock, runner = process.settings, process.clock, process.runner
    async with connection.connect(settings.store_url) as redis:
        tier_store, name = TierStore(redis), worker_name(process.identity.worker_id)
        follower = TierFollower(tier_store, consumer, name, process.tiers, settings.tiers_path, clock)
        changes = TierChanges(tier_store, follower, RedisQueue(redis, clock).depths, settings.tiers_path, clock)
        background = Background()
        with hangup_calls(lambda: background.start(changes.reload_on_signal()), runner.end):
            async with follower, background:
                background.start(changes.offer_file())
                background.start(report_life(lambda: runner.is_announced, is_stuck, process.health.note_alive))
                await keep_serving(lambda: build(redis), runner, clock)
    log.info("the worker has drained")


class LoopRunner:
    """The handler of stop signals: it ends the current loop, which it therefore knows.

    The first signal drains the loop. After `drain_s` seconds, or at a second signal, the loop stops and its unfinished
    requests go back to the queue.
    """

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._loop: WorkerLoop | None = None
        self.is_ending = asyncio.Event()

    def end(self) -> None:
        if self.is_ending.is_set():
            self._stop()
            return
        self.is_ending.set()
        if self._loop is not None:
            self._loop.drain()
        asyncio.get_running_loop().call_later(self._drain_s, self._stop)

    @property
    def is_announced(self) -> bool:
        """Whether the current loop has announced the worker to the gateways."""
        return self._loop is not None and self._loop.is_announced

    def why_not_ready(self) -> str:
        """Return why the worker serves no requests; an empty string if it does."""
        if self.is_ending.is_set():
            return "the worker drains"
        if self._loop is None or not self.is_announced:
            return "the worker starts, or the store does not answer"
        return self._loop.why_idle()

    @property
    def is_stuck(self) -> bool:
        return self._loop is not None and self._loop.is_stuck

    async def run(self, loop: WorkerLoop) -> None:
        self._loop = loop
        try:
            await loop.run()
        finally:
            self._loop = None

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()


async def keep_serving(build: Callable[[], WorkerLoop], runner: LoopRunner, clock: Clock) -> None:
    """Run a loop until it has drained. If the store stops answering meanwhile, run a new loop when the store is back.

    The new loop uses the same engine and core. Raises `RedisError` if an outage takes more than `GIVE_UP_S`. A store
    that answers but refuses writes is no outage: a new process would not help.
    """
    away_since_s: float | None = None
    num_failures = 0
    while not runner.is_ending.is_set():
        started_s = clock.now()
        try:
            return await runner.run(build())
        except RedisError as error:
            now = clock.now()
            if away_since_s is None or now - started_s >= SETTLED_S:
                away_since_s, num_failures = now, 0
            if isinstance(error, StoreRefused):
                away_since_s = now
            if now - away_since_s >= GIVE_UP_S:
                raise
            log.warning("the store does not answer; the worker keeps its engine and tries again", error=str(error))
        await _either(runner.is_ending.wait(), clock.sleep(pause_s(num_failures)))
        num_failures += 1
    log.warning("the worker ends without a store: other workers take over its requests when their leases end")


async def _either(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of `waits` has ended."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
