"""The worker process: one engine, and a scheduler loop that uses it until a signal drains the loop.

The engine outlives a loop: if the store is unreachable for a while, the work in progress is lost, but the loaded model
is kept. Exit codes: 0 after a signal; 78 if the engine cannot start (another attempt will not help); 1 after another
error, so that a supervisor starts a new worker. The new worker requeues the requests that the old worker held. Without
a new worker, these requests are requeued when their leases end.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics
from redis.asyncio import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_engine
from engine.interface import Engine, EngineDead, PlanError
from engine.upstream.connect import UpstreamConfig
from engine.upstream.connect import connect as connect_upstream
from scheduler.clock import Clock, SystemClock
from scheduler.config import TierConfigError, TierSet, load_tiers
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import SchedulerCore
from scheduler.drivers.steps.driver import StepDriver
from scheduler.drivers.steps.step_log import StepLogError, open_step_log
from scheduler.drivers.steps.warmup import warm_up
from scheduler.drivers.streams.core import StreamCore
from scheduler.drivers.streams.driver import StreamDriver
from scheduler.events.redis import RedisEventChannel
from scheduler.holdings.holdings import Holdings
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import TierStore
from scheduler.store import connection
from scheduler.store.errors import StoreRefused
from scheduler.worker.driver import Driver
from scheduler.worker.heartbeat import ReadGpus, WorkerIdentity
from scheduler.worker.loop import SchedulerLoop, build_loop
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.request_intake import RequestTracer
from tidegate.background import Background
from tidegate.gpu import gpu_reader
from tidegate.logs import is_for_people
from tidegate.notify import report_life
from tidegate.process import SWITCH_INTERVAL_S, freeze_heap, hangup_calls, ignore_hangup, signals_call, worker_name
from tidegate.settings import WorkerSettings
from tidegate.start_progress import StartProgress
from tidegate.supervisor import EX_CONFIG
from tidegate.tracing.start import TracingError, traced

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # s between two loops; the pause doubles with each failure
SETTLED_S = 30.0  # s; if a loop ran for this long, its failure counts as a new outage
GIVE_UP_S = 60.0  # s; the worker ends after an outage of the store of this length


def run_worker(settings: WorkerSettings) -> int:
    """Run the worker until SIGTERM or SIGINT. Return the exit code."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # else every counter has a second series
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ignore_hangup()
    try:
        tiers, worker_id = load_tiers(settings.tiers_path), _worker_id(settings)
        with traced("worker", worker_id, settings.otel) as tracing:
            tracer = tracing.requests_of(worker_id) if tracing is not None else None
            if settings.engine == "openai":
                asyncio.run(_serve_upstream(settings, tiers, tracer))
                return 0
            on_terminal = sys.stderr.isatty() and is_for_people(settings.log_format)
            with (
                StartProgress(worker_id, str(settings.redis_url), on_terminal) as progress,
                contextlib.closing(build_engine(engine_config(settings), progress)) as engine,
            ):
                asyncio.run(_serve(settings, tiers, engine, tracer, progress))
            return 0
    except (EngineStartError, TierConfigError, StepLogError, TracingError) as error:
        log.error("the worker cannot start", reason=str(error))
        return EX_CONFIG
    except KeyboardInterrupt:
        log.info("the worker was interrupted before it served")
        return 0
    except RedisError as error:
        log.error("the store does not answer", reason=str(error))
    except Exception:
        log.exception("the worker died")
    return 1


def engine_config(settings: WorkerSettings) -> EngineConfig:
    """Return the options of the engine that computes on this machine."""
    return EngineConfig(
        model=settings.model_path,
        load_format=settings.load_format,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        max_step_tokens=settings.max_step_tokens,
        kv_cache_bytes=settings.kv_cache_mb * 2**20 if settings.kv_cache_mb else None,
        swap_bytes=None if settings.swap_mb is None else settings.swap_mb * 2**20,
        prefix_cache=settings.prefix_cache,
        num_threads=settings.threads,
        cuda_graphs=settings.cuda_graphs,
        optimize=settings.optimize,
        engine="vllm" if settings.engine == "vllm" else "native",
        vllm_args=settings.vllm_args or "",
        adapters=tuple(settings.adapter_paths.items()),
    )


def upstream_config(settings: WorkerSettings) -> UpstreamConfig:
    """Return where the server is that computes the tokens, and what is known of it."""
    key = settings.upstream_api_key
    return UpstreamConfig(
        url=settings.upstream or "",
        model_path=settings.model_path,
        dialect=settings.upstream_dialect,
        model=settings.upstream_model,
        api_key=key.get_secret_value() if key is not None else "",
        max_model_len=settings.max_model_len,
    )


async def _serve(
    settings: WorkerSettings, tiers: TierSet, engine: Engine, tracer: RequestTracer | None, progress: StartProgress
) -> None:
    clock = SystemClock()
    identity = _identity(settings, clock)
    controller = SLAController(tiers, engine.info.step_eviction, engine.info.num_layers)
    core = SchedulerCore(tiers, engine.info, controller, worker_id=identity.worker_id)
    metrics = SchedulerMetrics(CollectorRegistry(), tiers)
    runner = LoopRunner(settings.drain_s)
    with signals_call(runner.end), contextlib.closing(open_step_log(settings.step_log, engine.info)) as step_log:
        with progress.phase("measuring steps"):
            await teach(engine, core, clock)
        await asyncio.to_thread(progress.close)
        read_gpus = gpu_reader(engine.info.device, _gpu_index(settings))

        def build(redis: Redis) -> SchedulerLoop:
            driver = StepDriver(core, engine, step_log)
            return _build_loop(driver, redis, metrics, clock, identity, read_gpus, tracer)

        log.info("the worker serves", step_cost=str(core.status(clock.now()).step_cost))
        consumer = WorkerTiers(core.held, metrics)
        await _serve_loops(settings, tiers, consumer, build, runner, lambda: runner.is_stuck, clock, identity)


def _gpu_index(settings: WorkerSettings) -> int | None:
    """Return which of the visible GPUs the engine uses; None for vLLM, which chooses by itself and may use several."""
    return int(settings.device.partition(":")[2] or 0) if settings.engine == "native" else None


async def _serve_upstream(settings: WorkerSettings, tiers: TierSet, tracer: RequestTracer | None) -> None:
    """Serve with the tokens of another server. While it is away, the worker lives and waits for it."""
    clock = SystemClock()
    identity = _identity(settings, clock)
    upstream = await connect_upstream(upstream_config(settings))
    core = StreamCore(
        tiers,
        upstream,
        SLAController(tiers),
        max_in_flight=settings.upstream_max_in_flight,
        stall_s=settings.upstream_stall_s,
        worker_id=identity.worker_id,
    )
    metrics = SchedulerMetrics(CollectorRegistry(), tiers)
    runner = LoopRunner(settings.drain_s)

    def build(redis: Redis) -> SchedulerLoop:
        return _build_loop(StreamDriver(core, upstream), redis, metrics, clock, identity, None, tracer)

    with signals_call(runner.end):
        consumer = WorkerTiers(core.held, metrics)
        await _serve_loops(settings, tiers, consumer, build, runner, lambda: False, clock, identity)


def _build_loop(
    driver: Driver,
    redis: Redis,
    metrics: SchedulerMetrics,
    clock: Clock,
    identity: WorkerIdentity,
    read_gpus: ReadGpus | None,
    tracer: RequestTracer | None,
) -> SchedulerLoop:
    queue = RedisQueue(redis, clock, identity.worker_id)
    events, registry = RedisEventChannel(redis), RedisWorkerRegistry(redis)
    return build_loop(driver, queue, events, registry, metrics, clock, identity, read_gpus, tracer)


def _worker_id(settings: WorkerSettings) -> str:
    return settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"


def _identity(settings: WorkerSettings, clock: Clock) -> WorkerIdentity:
    return WorkerIdentity(_worker_id(settings), settings.model_names, clock.wall_ms())


async def _serve_loops(
    settings: WorkerSettings,
    tiers: TierSet,
    consumer: "WorkerTiers",
    build: Callable[[Redis], SchedulerLoop],
    runner: "LoopRunner",
    is_stuck: Callable[[], bool],
    clock: Clock,
    identity: WorkerIdentity,
) -> None:
    """Follow changes of the tiers, and run the loops that `build` makes until a signal ends the worker.

    `is_stuck` says whether the supervisor should replace this process.
    """
    freeze_heap()
    async with connection.connect(str(settings.redis_url)) as redis:
        tier_store, name = TierStore(redis), worker_name(identity.worker_id)
        follower = TierFollower(tier_store, consumer, name, tiers, settings.tiers_path, clock)
        changes = TierChanges(tier_store, follower, RedisQueue(redis, clock).depths, settings.tiers_path, clock)
        background = Background()
        with hangup_calls(lambda: background.start(changes.reload_on_signal()), runner.end):
            async with follower, background:
                background.start(report_life(lambda: runner.is_announced, is_stuck))
                await keep_serving(lambda: build(redis), runner, clock)
    log.info("the worker has drained")


class WorkerTiers:
    """Applies changed tiers to a worker. Implements `scheduler.reload.follower.TierConsumer`."""

    def __init__(self, held: Holdings, metrics: SchedulerMetrics) -> None:
        self._held = held
        self._metrics = metrics

    def objection(self, tiers: TierSet) -> str:
        """Return why the worker cannot use `tiers`; an empty string if it can.

        The worker cannot remove a tier whose requests it holds.
        """
        for name in sorted({tier.name for tier in self._held.tiers} - set(tiers.tiers)):
            if held := self._held.table.count(name):
                return f"The tier {name!r} cannot be removed: requests of it are under way here ({held})."
        return ""

    def reconfigure(self, tiers: TierSet) -> None:
        self._held.reconfigure(tiers)
        self._metrics.reconfigure(tiers)


async def teach(engine: Engine, core: SchedulerCore, clock: Clock) -> None:
    """Run synthetic steps on the engine, from which the core learns how long steps take.

    Raises `EngineStartError` if a step fails, because such an engine could not serve requests either.
    """
    try:
        await warm_up(engine, core.observe_step_time, clock)
    except (EngineDead, PlanError) as error:
        raise EngineStartError(f"the engine's first steps failed: {error}") from error


class WorkerLoop(Protocol):
    """What serves until it is drained or stopped: a loop of steps, or of calls of a static endpoint."""

    @property
    def is_announced(self) -> bool: ...

    @property
    def is_stuck(self) -> bool: ...

    async def run(self) -> None: ...

    def drain(self) -> None: ...

    def stop(self) -> None: ...


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
    backoff = ExponentialBackoff(cap=LONGEST_PAUSE_S, base=FIRST_PAUSE_S)
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
        await _either(runner.is_ending.wait(), clock.sleep(backoff.compute(num_failures)))
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
